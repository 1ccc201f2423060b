#include "bindings/tensor_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/zeros.h>

namespace torch_ring {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::kInvalidArgument, why); }

}  // namespace

void check_tensor(const at::Tensor& tensor, const std::string& what) {
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    refuse(what + ": the tensor is not dense: use to_dense(), or sparse_allreduce_async()");
  }
  if (!tensor.is_cpu() && !tensor.is_cuda() && !tensor.is_privateuseone()) {
    refuse(what + ": tensors on " + tensor.device().str() + " are not supported: use cpu or cuda");
  }
  if (tensor._fw_grad(0).defined()) refuse(what + ": forward-mode derivatives are not supported");
  if (tensor._is_zerotensor()) return;  // zeros without memory
  if (!tensor.has_storage()) refuse(what + ": the tensor has no memory: is this in vmap or jvp?");
  const std::size_t needed =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                       static_cast<std::size_t>(tensor.storage_offset()));
  if (tensor.numel() > 0 && tensor.storage().nbytes() < needed) {
    refuse(what + ": the tensor's storage was resized and is too small for it");
  }
}

void check_writable(const at::Tensor& tensor, const std::string& what) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse(what +
           ": cannot write into an expanded tensor, of which several elements are one "
           "place in memory: clone() it");
  }
  if (tensor._is_zerotensor()) refuse(what + ": cannot write into a ZeroTensor: clone() it");
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj() &&
         !tensor._is_zerotensor();
}

at::Tensor values_of(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;  // the usual case, with no other check
  const at::Tensor detached = tensor.detach();
  if (detached._is_zerotensor()) return at::zeros(detached.sizes(), detached.options());
  return detached.resolve_conj().resolve_neg().contiguous();
}

}  // namespace torch_ring
