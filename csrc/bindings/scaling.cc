#include "bindings/scaling.h"

#include <ATen/ATen.h>

namespace torch_ring {

at::Tensor scaled(const at::Tensor& tensor, double factor) {
  if (tensor.is_floating_point()) return tensor * factor;
  return (tensor.to(at::kDouble) * factor).trunc_().to(tensor.scalar_type());
}

void scale_result(const at::Tensor& tensor, const Scaling& scaling) {
  const auto divisor = static_cast<double>(scaling.divisor);
  if (tensor.is_floating_point()) {
    tensor.mul_(scaling.postscale / divisor);
  } else if (scaling.postscale == 1.0) {
    // In int64, because int8 may not hold the divisor.
    tensor.copy_(tensor.to(at::kLong).div_(scaling.divisor, "trunc"));
  } else {
    tensor.copy_((tensor.to(at::kDouble) * scaling.postscale).div_(divisor).trunc_());
  }
}

}  // namespace torch_ring
