#include "bindings/scaling.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>

#include <limits>

namespace torch_ring {

namespace {

/// float64 values as integers: truncated toward zero, clamped to the range of `type`.
at::Tensor truncated(const at::Tensor& values, at::ScalarType type) {
  if (type != at::kLong) {
    const auto range = at::kInt == type     ? std::pair{-0x1p31, 0x1p31 - 1}
                       : at::kShort == type ? std::pair{-0x1p15, 0x1p15 - 1}
                       : at::kChar == type  ? std::pair{-0x1p7, 0x1p7 - 1}
                                            : std::pair{0.0, 0x1p8 - 1};
    return values.clamp(range.first, range.second).to(type);
  }
  using Limits = std::numeric_limits<std::int64_t>;
  const at::Tensor inside = values.clamp(-0x1p63, 0x1.fffffffffffffp62).to(type);
  return inside.masked_fill_(values.ge(0x1p63), Limits::max());
}

bool is_float(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

}  // namespace

void scale(const at::Tensor& output, const at::Tensor& input, const Scaling& scaling) {
  if (input.scalar_type() == at::kBool) {
    output.copy_(input);
    return;
  }
  const double factor = scaling.prescale * scaling.postscale / static_cast<double>(scaling.divisor);
  if (is_float(input)) {
    at::Tensor target = output;
    at::mul_out(target, input, at::native::wrapped_scalar_tensor(factor));
  } else {
    output.copy_(truncated(input.to(at::kDouble) * factor, input.scalar_type()));
  }
}

at::Tensor widened(const at::Tensor& tensor, const Reduction& reduction) {
  if (tensor.scalar_type() == at::kInt) return tensor.to(at::kLong);
  if (tensor.scalar_type() != at::kLong) return tensor.to(at::kInt);
  const std::int64_t ranks = reduction.scaling.divisor;
  const at::Tensor quotient = at::div(tensor, at::Scalar(ranks), "trunc");
  return at::stack({quotient, tensor - quotient * at::Scalar(ranks)}, 1);
}

void narrow(const at::Tensor& output, const at::Tensor& wide, const Reduction& reduction) {
  const Scaling& scaling = reduction.scaling;
  if (!averages_integers(reduction)) {
    output.copy_(wide);  // wraps around, as a sum in the dtype itself
    if (scaling.postscale != 1.0) scale(output, output, {.postscale = scaling.postscale});
    return;
  }
  const at::Scalar ranks(scaling.divisor);
  const bool is_pair = output.scalar_type() == at::kLong;
  if (scaling.postscale != 1.0) {
    const at::Tensor values = wide.to(at::kDouble);
    const at::Tensor sum = is_pair ? values.select(1, 0) * ranks + values.select(1, 1) : values;
    output.copy_(truncated(sum * scaling.postscale / static_cast<double>(scaling.divisor),
                           output.scalar_type()));
  } else if (!is_pair) {
    output.copy_(at::div(wide, ranks, "trunc"));
  } else {
    // The average rounded down, and what is left of the sum then; toward zero from there.
    const at::Tensor rest = wide.select(1, 1);
    const at::Tensor down = wide.select(1, 0) + at::div(rest, ranks, "floor");
    const at::Tensor is_inexact = at::remainder(rest, ranks).ne(0);
    output.copy_(down + down.lt(0).logical_and_(is_inexact).to(at::kLong));
  }
}

}  // namespace torch_ring
