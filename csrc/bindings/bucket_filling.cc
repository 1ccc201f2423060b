// How GradientHooks brings gradients into their buckets, those on a device many at once.
#include "bindings/gradient_hooks.h"

namespace torch_ring {

/// Completes a bucket all of whose gradients have arrived: those that were left outside are copied
/// now.
void GradientHooks::complete(std::unique_lock<std::mutex>& lock, std::size_t bucket) {
  const c10::Device device = parameters_[members_[bucket].front()].device;
  if (!device.is_cpu()) producers_[bucket].join(current_stream(device));
  BatchedCopy copies;
  for (const std::size_t i : members_[bucket]) {
    if (!parameters_[i].outside.defined()) continue;
    parameters_[i].refresh();
    spare_kept(lock, i, copies);
    parameters_[i].bring_in(copies);
  }
  copies.run();
}

void GradientHooks::move_into_buckets(const Bitmap& touched) {
  std::unique_lock lock(mutex_);
  BatchedCopy copies;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!get(touched, i)) continue;
    HookedParameter& parameter = parameters_[i];
    parameter.refresh();
    if (!parameter.arrived || parameter.outside.defined()) spare_kept(lock, i, copies);
    at::Tensor& grad = parameter.variable.mutable_grad();
    const bool is_in_view = parameter.bucket_view.defined() || parameter.outside.defined();
    if (parameter.arrived && is_in_view && !parameter.sparse.defined()) {
      // Its bucket may be in flight already, whatever `grad` was set to since.
      parameter.bring_in(copies);
      if (!parameter.is_given()) grad = parameter.bucket_view;
    } else if (!grad.defined()) {
      parameter.make_zero(copies);
    } else {
      if (!parameter.unreduced) rescale_reduced(parameter);
      parameter.copy_in(copies);
    }
  }
  copies.run();
}

/// Copies the gradients that this pass leaves outside their buckets, as they are not due yet, so
/// that only the buckets' memory is in use until they are. The pass has ended, and autograd has
/// made the current stream follow all others of the pass.
void GradientHooks::settle() {
  std::unique_lock lock(mutex_);
  BatchedCopy copies;
  for (const std::size_t i : arrived_) {
    HookedParameter& parameter = parameters_[i];
    parameter.refresh();
    if (!parameter.outside.defined() || parameter.has_moved()) continue;
    if (!parameter.is_given() && parameter.variable.mutable_grad().is_same(parameter.outside)) {
      spare_kept(lock, i, copies);
      parameter.bring_in(copies);
    }
    parameter.outside.reset();
  }
  copies.run();
}

}  // namespace torch_ring
