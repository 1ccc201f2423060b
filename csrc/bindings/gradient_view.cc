#include "bindings/gradient_view.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/strides.h>

#include <cstring>

namespace torch_ring {

GradientView GradientView::in(const at::Tensor& bucket, std::int64_t offset,
                              const at::Tensor& variable) {
  GradientView view;
  view.bucket = bucket;
  view.data = static_cast<std::byte*>(bucket.data_ptr()) + offset * bucket.element_size();
  view.sizes = at::DimVector(variable.sizes());
  view.strides = variable.is_non_overlapping_and_dense()
                     ? at::DimVector(variable.strides())
                     : c10::contiguous_strides(variable.sizes());
  view.dtype =
      variable.is_complex() ? c10::toComplexType(bucket.scalar_type()) : bucket.scalar_type();
  return view;
}

std::size_t GradientView::bytes() const {
  return static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
}

void GradientView::move_to(std::shared_ptr<void> memory) {
  const auto options = at::TensorOptions().dtype(dtype);
  void* const block = memory.get();
  bucket =
      block == nullptr
          ? at::empty_strided(sizes, strides, options)
          : at::from_blob(block, sizes, strides, [memory = std::move(memory)](void*) {}, options);
  data = static_cast<std::byte*>(bucket.mutable_data_ptr());
  bucket = flat(bucket);
}

at::Tensor GradientView::tensor() const {
  return at::from_blob(
      data, sizes, strides, [owner = bucket](void*) {}, bucket.options().dtype(dtype),
      bucket.device());
}

at::Tensor flat(const at::Tensor& tensor) {
  const c10::ScalarType real = c10::toRealValueType(tensor.scalar_type());
  const auto numel = static_cast<std::int64_t>(tensor.nbytes() / c10::elementSize(real));
  return at::from_blob(
      tensor.mutable_data_ptr(), {numel}, [owner = tensor.storage()](void*) {},
      tensor.options().dtype(real));
}

void copy_into(const at::Tensor& to, const at::Tensor& from) {
  if (from.is_sparse()) return copy_into(to, from.detach().to_dense());
  const bool same_layout = from.is_cpu() && from.scalar_type() == to.scalar_type() &&
                           from.strides() == to.strides() && !from.is_neg() && !from.is_conj() &&
                           !from._is_zerotensor();
  if (same_layout) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    const at::NoGradGuard no_grad;  // with create_graph=True the gradient has a graph
    to.copy_(from);
  }
}

}  // namespace torch_ring
