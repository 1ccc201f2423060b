// The part of GradientHooks for planned passes, in which a rank cannot know the others' gradients.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "bindings/gradient_hooks.h"

namespace torch_ring {

void GradientHooks::expect(std::optional<Bitmap> planned) {
  const std::scoped_lock lock(mutex_);
  planned_ = std::move(planned);
  has_plan_ = planned_.has_value();
  count_missing();
}

/// Counts the gradients that each bucket still waits for, at the begin of a pass.
void GradientHooks::count_missing() {
  missing_.assign(buckets_.size(), 0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!planned_ || get(*planned_, i)) ++missing_[parameters_[i].bucket];
  }
}

GradientHooks::Before GradientHooks::before(const HookedParameter& parameter) const {
  const at::NoGradGuard no_grad;
  const at::Tensor& grad = parameter.variable.grad();
  const bool in_bucket = grad.defined() && grad.is_same(parameter.bucket_view);
  std::optional<std::uint32_t> writes;
  if ((in_bucket || parameter.is_given()) && parameter.version)
    writes = parameter.current_version() - *parameter.version;
  return {grad,
          grad.defined() ? grad.clone() : grad,
          in_bucket,
          parameter.unreduced,
          parameter.base_reduced,
          parameter.reduced,
          writes};
}

void GradientHooks::give_back(HookedParameter& parameter, const Before& before) {
  const at::NoGradGuard no_grad;
  parameter.unreduced = before.unreduced;
  parameter.base_reduced = before.base_reduced;
  parameter.reduced = before.reduced;
  at::Tensor& grad = parameter.variable.mutable_grad();
  grad = before.in_bucket ? parameter.bucket_view : before.grad;  // the bucket may have moved
  parameter.outside.reset();
  if (!grad.defined()) return;
  grad.copy_(before.value);
  if (before.writes) parameter.version = parameter.current_version() - *before.writes;
}

/// Before autograd adds an unplanned gradient to an earlier value: keeps that for put_aside().
void GradientHooks::keep_base(std::size_t index) {
  if (!planned_ || get(*planned_, index)) return;
  const HookedParameter& parameter = parameters_[index];
  if (!parameter.variable.grad().defined()) {
    bases_.erase(index);
  } else if (!parameter.unreduced) {
    bases_.insert_or_assign(index, before(parameter));
  }
}

void GradientHooks::fill(const Bitmap& planned, const Bitmap& due) {
  {
    const std::scoped_lock lock(mutex_);
    filled_.clear();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!get(planned, i) || get(due, i)) continue;
      parameters_[i].refresh();
      filled_.emplace(i, before(parameters_[i]));
    }
  }
  move_into_buckets(planned);
}

void GradientHooks::restore(const Bitmap& nowhere) {
  const std::scoped_lock lock(mutex_);
  for (const auto& [index, before] : filled_) {
    if (get(nowhere, index)) give_back(parameters_[index], before);
  }
  filled_.clear();
}

void GradientHooks::put_aside(const Bitmap& extra) {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!get(extra, i)) continue;
    HookedParameter& parameter = parameters_[i];
    parameter.refresh();
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (!grad.defined()) continue;
    at::Tensor mine = grad.is_sparse() ? grad.to_dense() : grad.clone();
    const auto base = bases_.find(i);
    if (base != bases_.end()) {
      const Before& before = base->second;
      mine.sub_(before.value, before.base_reduced ? scale() : 1.0);
      give_back(parameter, before);
      bases_.erase(base);
    } else {
      grad.reset();
      parameter.unreduced = parameter.base_reduced = false;
    }
    parameter.passes = 0;
    parameter.sparse.reset();
    parameter.outside.reset();
    at::Tensor& kept = aside_[i];
    kept = kept.defined() ? kept.to(mine.device()).add_(mine) : mine;
  }
}

void GradientHooks::take_up_aside(bool again) {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(mutex_);
  if (again != again_) return;
  again_ = false;
  for (auto& [index, kept] : std::exchange(aside_, {})) {
    HookedParameter& parameter = parameters_[index];
    parameter.refresh();
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (!grad.defined()) {
      parameter.outside = grad = kept.to(parameter.variable.device());
      parameter.outside_stream.reset();
      parameter.base_reduced = false;
    } else {
      if (!parameter.unreduced) rescale_reduced(parameter);
      if (grad.is_sparse()) grad = grad.to_dense();
      grad.add_(kept.to(grad.device()));
    }
    parameter.unreduced = true;
    parameter.passes = std::max(parameter.passes, passes_per_step_);
  }
}

}  // namespace torch_ring
