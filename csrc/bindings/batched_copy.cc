#include "bindings/batched_copy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "bindings/gradient_view.h"
#include "bindings/streams.h"

namespace torch_ring {
namespace {

/// Whether the elements of two tensors of one shape lie in the same order: strides of dimensions
/// of one element do not count. Autograd's gradients may differ from their parameter there.
bool have_same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (std::int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

/// Whether torch copies the gradient together with others. One that does not fit would make it copy
/// all of them one by one.
bool fits_batch(const at::Tensor& to, const at::Tensor& from) {
  return from.layout() == at::kStrided && from.device() == to.device() &&
         from.scalar_type() == to.scalar_type() && have_same_layout(to, from) && !from.is_neg() &&
         !from.is_conj() && !from._is_zerotensor() &&
         !from.unsafeGetTensorImpl()->is_python_dispatch();
}

}  // namespace

void BatchedCopy::copy(const at::Tensor& to, const at::Tensor& from,
                       const std::optional<c10::Stream>& stream) {
  if (to.is_cpu()) return copy_into(to, from);
  if (stream && *stream != current_stream(to.device())) {
    record_on_stream(from, current_stream(to.device()));
  }
  if (!fits_batch(to, from)) return copy_into(to, from);
  const at::NoGradGuard no_grad;  // with create_graph=True the gradient has a graph
  Batch& batch = batch_of(to);
  batch.to.push_back(to);
  batch.from.push_back(from.strides() == to.strides() ? from
                                                      : from.as_strided(to.sizes(), to.strides()));
}

void BatchedCopy::zero(const at::Tensor& view) {
  if (view.is_cpu()) {
    view.zero_();
  } else {
    batch_of(view).zero.push_back(view);
  }
}

void BatchedCopy::run() {
  const at::NoGradGuard no_grad;
  for (const Batch& batch : std::exchange(batches_, {})) {
    if (!batch.to.empty()) at::_foreach_copy_(batch.to, batch.from);
    if (!batch.zero.empty()) at::_foreach_zero_(batch.zero);
  }
}

BatchedCopy::Batch& BatchedCopy::batch_of(const at::Tensor& view) {
  for (Batch& batch : batches_) {
    const at::Tensor& other = batch.to.empty() ? batch.zero.front() : batch.to.front();
    if (other.device() == view.device() && other.scalar_type() == view.scalar_type()) return batch;
  }
  return batches_.emplace_back();
}

}  // namespace torch_ring
