#include "bindings/tensor_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace torch_ring {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::kInvalidArgument, why); }

void require_memory(const at::Tensor& tensor, const std::string& what) {
  if (const auto why = lack_of_memory(tensor)) refuse(what + ": the tensor " + *why);
}

}  // namespace

std::optional<std::string> lack_of_memory(const at::Tensor& tensor) {
  const bool has_storage = tensor.has_storage();
  if (has_storage && tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()) {
    return std::nullopt;
  }
  if (tensor.layout() != at::kStrided || tensor._is_zerotensor()) return std::nullopt;
  if (has_storage && tensor.sym_numel().maybe_as_int() == 0) return std::nullopt;
  if (has_storage && tensor.storage().sym_nbytes().maybe_as_int() == 0) {
    return "has no memory: its storage was resized to nothing";
  }
  const pybind11::gil_scoped_acquire gil;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  const std::string type = object ? Py_TYPE(object.ptr())->tp_name : "Tensor";
  if (!tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    return "has no memory: is this in vmap, jvp, functionalize or a trace?";
  }
  return "is a " + type + ", which has no memory of its own: give the tensor that it wraps " +
         "(to_local() of a DTensor), or leave the mode that made it";
}

void check_tensor(const at::Tensor& tensor, const std::string& what) {
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    refuse(what + ": the tensor is not dense: use to_dense(), or sparse_allreduce_async()");
  }
  if (!tensor.is_cpu() && !tensor.is_cuda() && !tensor.is_privateuseone()) {
    refuse(what + ": tensors on " + tensor.device().str() + " are not supported: use cpu or cuda");
  }
  if (tensor._fw_grad(0).defined()) refuse(what + ": forward-mode derivatives are not supported");
  if (tensor._is_zerotensor()) return;  // zeros without memory
  require_memory(tensor, what);
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
  require_memory(tensor, what);
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
