// SPDX-License-Identifier: Apache-2.0
#include "gradients/hooked_parameter.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "bindings/accelerator.h"
#include "bindings/requests.h"

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

void add_to(at::Tensor& to, const at::Tensor& from) {
  const at::Tensor here = from.to(to.device());
  if (to.is_sparse() && !here.is_sparse()) {
    to = here.add(to);
  } else {
    to.add_(here);
  }
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

namespace {

/// Whether the elements of two tensors of one shape lie in the same order: strides of dimensions
/// of one element do not count. Autograd's gradients may differ from their parameter in these.
bool have_same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (std::int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

/// Whether torch can copy the gradient together with others. A gradient that does not fit would
/// make it copy all of them one by one.
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
namespace older_torch {

/// For a torch without this function, in which an idle Python object holds no reference.
template <class Tensor>
bool is_tensor_stealable(const Tensor& tensor, std::size_t expected = 1) {
  return tensor.use_count() <= expected;
}

}  // namespace older_torch

namespace torch_ring {

namespace {

using namespace ::older_torch;
using namespace torch::autograd::impl;  // torch's own, if any, is preferred: it is not a template

bool has_one_owner(const at::Tensor& tensor) { return is_tensor_stealable(tensor); }

/// The number of known references to the memory of `grad`: its own, and those of `gradient` if
/// autograd has stolen its memory. While hooks run, autograd keeps `gradient`; a view (of the
/// transposed gradient, say) keeps its base. 0: there are other references.
std::size_t known_owners(const at::Tensor& grad, const at::Tensor& gradient) {
  const at::Storage& storage = grad.storage();
  if (!gradient.has_storage() || !gradient.storage().is_alias_of(storage)) return 1;
  if (!has_one_owner(gradient)) return 0;
  if (!gradient.is_view()) return 2;
  const at::Tensor base(gradient._base());
  const bool only_here = is_tensor_stealable(base, 2);  // the local `base` is one more reference
  return only_here && base.storage().is_alias_of(storage) ? 3 : 0;
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

bool is_zero_everywhere(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return !at::any(tensor.is_sparse() ? tensor.to_dense() : tensor).item<bool>();
}

/// Whether a gradient can be written to, with each element at a place of its own, unlike an
/// expanded one.
bool is_writable(const at::Tensor& grad) {
  return grad.layout() == at::kStrided && !grad.is_inference() && !grad.is_neg() &&
         !grad.is_conj() && !grad._is_zerotensor() &&
         !grad.unsafeGetTensorImpl()->is_python_dispatch() &&
         at::has_internal_overlap(grad) != at::MemOverlap::Yes;
}

}  // namespace

void FormerTensor::set(const at::Tensor& tensor) {
  tensor_.emplace(tensor.getIntrusivePtr());
  data_ = tensor.const_data_ptr();
}

bool FormerTensor::is(const at::Tensor& grad) const {
  return tensor_ && grad.defined() && tensor_->_unsafe_get_target() == grad.unsafeGetTensorImpl();
}

bool AveragedPart::carries_value() const { return value_.defined() && !is_zero_everywhere(value_); }

void AveragedPart::take_out(at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  if (is_both()) {
    grad.sub_(value_.to(grad.device()));
  } else {
    value_ = grad.clone();
    grad.zero_();
  }
  state_ = State::kApart;
}

void AveragedPart::put_back(at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  state_ = State::kBoth;
  add_to(grad, value_);
}

void AveragedPart::note_version(const at::Tensor& grad) {
  if (is_both()) noted_ = version_of(grad);
}

void AveragedPart::note_changes(const at::Tensor& grad, bool is_known, bool sums) {
  if (!is_both() || (is_known && version_of(grad) == noted_)) return;
  if (grad.defined() && sums && carries_value() && !is_zero_everywhere(grad)) {
    is_changed_ = true;
  } else {
    forget();
  }
}

HookedParameter::HookedParameter(at::Tensor of, std::string its_name)
    : variable(std::move(of)), name(std::move(its_name)), dtype(variable.scalar_type()) {
  const bool frozen = !variable.requires_grad();
  if (frozen) variable.set_requires_grad(true);  // otherwise it has no accumulator
  accumulator = torch::autograd::impl::grad_accumulator(variable);
  if (frozen) variable.set_requires_grad(false);
}

void HookedParameter::refresh() {
  if (in_block() && !bucket_view.defined()) {
    const at::Tensor& grad = variable.mutable_grad();
    if (known.is(grad) && grad.const_data_ptr() == view.data) bucket_view = grad;
  } else if (bucket_view.defined() && bucket_view.numel() > 0 &&
             bucket_view.const_data_ptr() != view.data) {
    bucket_view.reset();
    if (in_block()) {
      view.bucket.reset();
    } else {
      bucket_view = view.tensor();
    }
  }
}

bool HookedParameter::on_gradient(const at::Tensor& gradient, bool is_new) {
  const at::Tensor& grad = variable.mutable_grad();
  made = made || is_new;
  if (has_moved()) return !converted;  // it is copied when it has memory on the new device
  const bool was_given = is_given();
  if (!made) note_given();
  if (in_block() && !grad.is_same(bucket_view) && !is_given() && computed_in_block(gradient)) {
    require_unchanged();
    view.bucket.reset();
    view.data = static_cast<std::byte*>(grad.mutable_data_ptr());
    bucket_view = grad;
    sparse.reset();
    converted = false;
    return true;
  }
  BatchedCopy at_once;  // as all copies on the host are
  if (!grad.is_sparse()) {
    const bool unknown = on_device() || is_given() ? leave_outside() : copy_in(at_once);
    return unknown && !was_given;
  }
  require_unchanged();
  const bool fresh = !grad.is_same(sparse);
  sparse = grad;
  outside.reset();
  return fresh;
}

/// Whether `grad`, which autograd has just made from `gradient`, can be reduced in place: in a
/// block without other references.
bool HookedParameter::computed_in_block(const at::Tensor& gradient) const {
  const at::Tensor& grad = variable.grad();
  return grad.layout() == at::kStrided && grad.is_cpu() && grad.scalar_type() == view.dtype &&
         grad.sizes() == view.sizes && grad.strides() == view.strides && !grad.requires_grad() &&
         !grad.is_neg() && !grad.is_conj() && !grad._is_zerotensor() &&
         !grad.unsafeGetTensorImpl()->is_python_dispatch() && grad.storage_offset() == 0 &&
         grad.storage().nbytes() == view.bytes() && has_one_owner(grad) &&
         grad.storage().use_count() == known_owners(grad, gradient) &&
         direct->got(grad.const_data_ptr());
}

void HookedParameter::follow(const Accumulator& other) {
  accumulator = other;
  const at::Tensor& grad = variable.mutable_grad();
  if (!grad.defined()) return;
  converted = known.is(grad) || given.is(grad) || grad.is_same(bucket_view);
}

void HookedParameter::lie_in(GradientView other) {
  view = std::move(other);
  const at::Tensor before = std::exchange(bucket_view, view.tensor());
  at::Tensor& grad = variable.mutable_grad();
  const bool is_in_view = before.defined() && grad.is_same(before);
  const bool is_copied = before.defined() && !has_moved() && (arrived || is_given());
  if (is_in_view || is_copied) copy_into(bucket_view, before);
  if (is_in_view) grad = bucket_view;
  note_version();
  if (is_given()) return;
  if (!version) return;
  // Keeps the number of writes since the step began.
  *version = current_version() - (before.defined() ? version_of(before) - *version : 0);
}

bool HookedParameter::would_overwrite_kept() const {
  if (in_block() || !bucket_view.defined() || bucket_view.numel() == 0) return false;
  const at::Tensor& grad = variable.grad();
  if (grad.is_same(bucket_view) || has_moved()) return false;
  return !has_one_owner(bucket_view) || bucket_view.storage().use_count() != 1;
}

bool HookedParameter::copy_in(BatchedCopy& copies) {
  at::Tensor& grad = variable.mutable_grad();
  const bool known_outside = grad.is_same(std::exchange(outside, {}));
  const auto stream = std::exchange(outside_stream, std::nullopt);
  sparse.reset();
  if (grad.is_same(bucket_view)) return false;
  require_reducible();
  if (!made && !known_outside) note_given();
  ensure_memory();
  copies.copy(bucket_view, grad, known_outside ? stream : std::nullopt);
  if (!is_given()) grad = bucket_view;
  return !std::exchange(converted, false) && !known_outside;
}

/// Leaves a gradient in place until its bucket is full; returns whether the hook did not know it.
bool HookedParameter::leave_outside() {
  const at::Tensor& grad = variable.grad();
  sparse.reset();
  if (grad.is_same(bucket_view)) {
    outside.reset();
    return false;
  }
  if (grad.is_same(outside)) return false;
  require_reducible();
  outside = grad;
  outside_stream.reset();
  if (on_device()) outside_stream = current_stream(device);
  return !std::exchange(converted, false);
}

/// Records that `grad` is the program's, if it is not one of ours. Call it if `grad` was there
/// before the pass.
void HookedParameter::note_given() {
  const at::Tensor& grad = variable.grad();
  if (grad.is_same(bucket_view) || grad.is_same(outside) || !is_writable(grad)) return;
  if (known.is(grad) || (converted && !given.is(grad))) return;
  given.set(grad);
}

void HookedParameter::write_back(BatchedCopy& copies) {
  if (!is_given()) return;
  const at::NoGradGuard no_grad;
  at::Tensor& grad = variable.mutable_grad();
  on_device() ? copies.copy(grad, bucket_view) : void(grad.copy_(bucket_view));
}

void HookedParameter::bring_in(BatchedCopy& copies) {
  const at::Tensor gradient = std::exchange(outside, {});
  if (!gradient.defined()) return;
  ensure_memory();
  copies.copy(bucket_view, gradient, std::exchange(outside_stream, std::nullopt));
  if (at::Tensor& grad = variable.mutable_grad(); grad.is_same(gradient) && !is_given()) {
    grad = bucket_view;
  }
}

void HookedParameter::make_zero(BatchedCopy& copies) {
  ensure_memory();
  copies.zero(bucket_view);
  sparse.reset();
  outside.reset();
  variable.mutable_grad() = bucket_view;
}

void HookedParameter::take_over(HookedParameter& other, int most) {
  other.refresh();
  passes = other.unreduced ? std::min(other.passes, most) : 0;
  reduced_at = other.reduced_at;
  unreduced = other.unreduced;
  averaged = other.averaged;
  is_zero = other.is_zero;
  given = other.given;
  sparse = other.sparse;
  outside = other.outside;
  outside_stream = other.outside_stream;
  version = other.version;
  at::Tensor& grad = variable.mutable_grad();
  const bool is_there = grad.defined() && other.bucket_view.defined() && !has_moved() &&
                        (grad.is_same(other.bucket_view) || other.is_given());
  if (is_there) {
    ensure_memory();
    BatchedCopy copies;
    copies.copy(bucket_view, other.bucket_view);
    copies.run();
    if (!is_given()) {
      const std::uint32_t last = other.current_version();
      grad = bucket_view;
      if (version) version = current_version() - (last - *other.version);
    }
    release_to_grad();
  }
  note_version();
  other.forget();
}

/// Forgets the gradient, which another slot has taken over.
void HookedParameter::forget() {
  passes = 0;
  reduced_at = 0;
  unreduced = is_zero = false;
  averaged.forget();
  arrived = made = converted = false;
  given.reset();
  known.reset();
  sparse.reset();
  outside.reset();
  outside_stream.reset();
  saved.reset();
  version.reset();
  if (!in_block()) return;
  bucket_view.reset();
  view.bucket.reset();
}

void HookedParameter::ensure_memory() {
  if (bucket_view.defined()) return;
  view.move_to(direct->blocks().take(view.bytes()));
  bucket_view = view.tensor();
}

void HookedParameter::release_to_grad() {
  if (!variable.grad().defined()) version.reset();  // the step begins without a gradient
  if (!in_block() || !bucket_view.defined() || is_given()) return;
  known.set(bucket_view);
  bucket_view.reset();
  view.bucket.reset();
}

void HookedParameter::require_reducible() const {
  const at::Tensor& grad = variable.grad();
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided || grad.is_sparse(), "the gradient of '", name,
                    "' has layout ", grad.layout(), ", which cannot be reduced");
  const auto lack = lack_of_memory(grad);
  TORCH_CHECK_VALUE(!lack, "the gradient of '", name, "' ", *lack);
  require_unchanged();
}

/// Throws if the gradient does not fit its view: the parameter's shape or dtype has changed.
void HookedParameter::require_unchanged() const {
  const at::Tensor& grad = variable.grad();
  TORCH_CHECK_VALUE(grad.sizes() == view.sizes, "parameter '", name,
                    "' has changed its shape from ", at::IntArrayRef(view.sizes), " to ",
                    grad.sizes(),
                    " since the optimizer was wrapped: make a new optimizer and wrap that");
  TORCH_CHECK_VALUE(variable.scalar_type() == dtype, "parameter '", name,
                    "' has changed its dtype from ", dtype, " to ", variable.scalar_type(),
                    " since the optimizer was wrapped: convert the model first, on all ranks, then "
                    "make a new optimizer and wrap that",
                    name.starts_with("allreduce.noname.")
                        ? " with named_parameters=model.named_parameters(), for errors with names"
                        : "");
}

void HookedParameter::be_reduced(std::uint64_t now) {
  unreduced = is_zero = arrived = false;
  averaged.become_whole();
  reduced_at = now;
  version.reset();
}

/// Whether `grad` is the gradient that the hooks know, in its own memory or converted.
bool HookedParameter::is_known() const {
  const at::Tensor& grad = variable.grad();
  return grad.defined() && (converted || has_known() || grad.is_same(outside));
}

void HookedParameter::carry() {
  if ((averaged.is_apart() && arrived) || averaged.is_changed()) return;
  if (!is_known()) return averaged.forget();
  if (averaged.is_none() || averaged.is_apart() || (averaged.is_whole() && unreduced)) return;
  at::Tensor& grad = variable.mutable_grad();
  const bool may_be_zero =
      averaged.is_whole() &&
      (is_given() || (version && grad.is_same(bucket_view) && *version != current_version()));
  if (may_be_zero && !on_device() && has_zeros()) return averaged.forget();
  const std::uint32_t before = bucket_view.defined() ? current_version() : 0;
  averaged.take_out(grad);
  if (version && bucket_view.defined()) *version += current_version() - before;
}

void HookedParameter::rejoin() {
  if (!averaged.is_apart()) return;
  refresh();
  unreduced = variable.grad().defined();      // the hook after autograd's addition may have failed
  if (!is_known()) return averaged.forget();  // the program has replaced it, or autograd
  const std::uint32_t before = bucket_view.defined() ? current_version() : 0;
  averaged.put_back(variable.mutable_grad());
  if (version && bucket_view.defined()) *version += current_version() - before;
}

void HookedParameter::note_changes(bool sums) {
  if (!averaged.is_both()) return;
  refresh();
  averaged.note_changes(variable.grad(), is_known(), sums);
}

bool HookedParameter::has_known() const {
  const at::Tensor& grad = variable.grad();
  return grad.is_same(bucket_view) || grad.is_same(sparse) || is_given();
}

bool HookedParameter::written_by_hand() const {
  if (unreduced || !version || *version == current_version()) return false;
  const at::Tensor& grad = variable.grad();
  // All views of one tensor share a version, so that of a given gradient also counts writes to
  // other views.
  return (grad.is_same(bucket_view) || (is_given() && !at::equal(grad, bucket_view))) &&
         !has_zeros();
}

bool HookedParameter::is_by_hand(std::uint64_t since) {
  refresh();
  if (unreduced || reduced_at > since || !variable.grad().defined()) return false;
  return !has_known() || written_by_hand();
}

bool HookedParameter::may_be_by_hand(bool was_reduced) const {
  const at::Tensor& grad = variable.grad();
  if (unreduced || was_reduced || !grad.defined()) return false;
  if (!has_known()) return true;
  const bool has_version = version && !grad.is_same(sparse);
  const bool is_written = has_version && *version != current_version();
  return (is_zero && version) || is_written ? !has_zeros() : averaged.is_whole();
}

bool HookedParameter::has_zeros() const { return is_zero_everywhere(variable.grad()); }

std::uint32_t HookedParameter::current_version() const {
  return version_of(is_given() ? variable.grad() : bucket_view);
}

void HookedParameter::rescale_averaged(double scale) {
  if (unreduced || !averaged.is_whole() || !is_known()) return;
  averaged.forget();
  if (scale == 1.0) return;
  const at::NoGradGuard no_grad;
  variable.mutable_grad().mul_(scale);
}

}  // namespace torch_ring
