#include "bindings/hooked_parameter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace older_torch {

/// In a torch without such a function an idle Python object holds no reference.
template <class Tensor>
bool is_tensor_stealable(const Tensor& tensor, std::size_t expected = 1) {
  return tensor.use_count() <= expected;
}

}  // namespace older_torch

namespace torch_ring {

namespace {

using namespace ::older_torch;
using namespace torch::autograd::impl;  // torch's own is no template, and so preferred

bool has_one_owner(const at::Tensor& tensor) { return is_tensor_stealable(tensor); }

/// How often `grad` and `gradient`, if autograd has stolen it, hold their memory. As long as hooks
/// run, autograd keeps `gradient`; a view (of the transposed gradient, say) keeps its base.
std::size_t known_owners(const at::Tensor& grad, const at::Tensor& gradient) {
  const at::Storage& storage = grad.storage();
  if (!gradient.has_storage() || !gradient.storage().is_alias_of(storage)) return 1;
  if (!has_one_owner(gradient)) return 0;
  if (!gradient.is_view()) return 2;
  const at::Tensor base(gradient._base());
  const bool only_here = is_tensor_stealable(base, 2);  // `base` itself is one more
  return only_here && base.storage().is_alias_of(storage) ? 3 : 0;
}

}  // namespace

HookedParameter::HookedParameter(at::Tensor of, std::string its_name)
    : variable(std::move(of)), name(std::move(its_name)), dtype(variable.scalar_type()) {
  const bool frozen = !variable.requires_grad();
  if (frozen) variable.set_requires_grad(true);  // or it has no accumulator
  accumulator = torch::autograd::impl::grad_accumulator(variable);
  if (frozen) variable.set_requires_grad(false);
}

void HookedParameter::keep_place() {
  if (in_block() && !view.defined()) {
    const at::Tensor& grad = variable.mutable_grad();
    const bool is_known =
        known && grad.defined() && known->_unsafe_get_target() == grad.unsafeGetTensorImpl();
    if (is_known && grad.const_data_ptr() == place.data) view = grad;
  } else if (view.defined() && view.numel() > 0 && view.const_data_ptr() != place.data) {
    view.reset();
    if (in_block()) {
      place.bucket.reset();
    } else {
      view = place.view();
    }
  }
}

bool HookedParameter::take(const at::Tensor& gradient) {
  const at::Tensor& grad = variable.mutable_grad();
  if (in_block() && !grad.is_same(view) && computed_in_block(gradient)) {
    require_unchanged();
    place.bucket.reset();
    place.data = static_cast<std::byte*>(grad.mutable_data_ptr());
    view = grad;
    sparse.reset();
    return true;
  }
  if (!grad.is_sparse()) return move_in();
  require_unchanged();
  const bool fresh = !grad.is_same(sparse);
  sparse = grad;
  return fresh;
}

/// Whether `grad`, which autograd has just made of `gradient`, can be reduced where it lies: in a
/// block that nobody else can reach.
bool HookedParameter::computed_in_block(const at::Tensor& gradient) const {
  const at::Tensor& grad = variable.grad();
  return grad.layout() == at::kStrided && grad.is_cpu() && grad.scalar_type() == place.dtype &&
         grad.sizes() == place.sizes && grad.strides() == place.strides && !grad.requires_grad() &&
         !grad.is_neg() && !grad.is_conj() && !grad._is_zerotensor() &&
         !grad.unsafeGetTensorImpl()->is_python_dispatch() && grad.storage_offset() == 0 &&
         grad.storage().nbytes() == place.bytes() && has_one_owner(grad) &&
         grad.storage().use_count() == known_owners(grad, gradient) &&
         direct->got(grad.const_data_ptr());
}

bool HookedParameter::move_in() {
  at::Tensor& grad = variable.mutable_grad();
  sparse.reset();
  if (grad.is_same(view)) return false;
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided || grad.is_sparse(), "the gradient of '", name,
                    "' has layout ", grad.layout(), ", which cannot be reduced");
  require_unchanged();
  make_room();
  copy_into(view, grad);
  grad = view;
  return true;
}

void HookedParameter::make_zero() {
  make_room();
  view.zero_();
  sparse.reset();
  variable.mutable_grad() = view;
}

void HookedParameter::make_room() {
  if (view.defined()) return;
  place.move_to(direct->blocks().take(place.bytes()));
  view = place.view();
}

void HookedParameter::let_go() {
  if (!in_block() || !view.defined()) return;
  known.emplace(view.getIntrusivePtr());
  view.reset();
  place.bucket.reset();
}

/// A place has room for the shape that the parameter had, in the dtype that it had.
void HookedParameter::require_unchanged() const {
  const at::Tensor& grad = variable.grad();
  TORCH_CHECK_VALUE(grad.sizes() == place.sizes, "parameter '", name,
                    "' has changed its shape from ", at::IntArrayRef(place.sizes), " to ",
                    grad.sizes(),
                    " since the optimizer was wrapped: make a new optimizer and wrap that");
  TORCH_CHECK_VALUE(variable.scalar_type() == dtype, "parameter '", name,
                    "' has changed its dtype from ", dtype, " to ", variable.scalar_type(),
                    " since the optimizer was wrapped: make a new optimizer and wrap that");
}

bool HookedParameter::written_by_hand() const {
  return !held && version && variable.grad().is_same(view) && *version != current_version();
}

std::uint32_t HookedParameter::current_version() const {
  if (view.is_inference()) return 0;
  return static_cast<std::uint32_t>(view._version());
}

void HookedParameter::discount(double scale) {
  if (scale == 1.0 || held || !base_reduced) return;
  at::Tensor& grad = variable.mutable_grad();
  if (!grad.defined()) return;  // which is_same() takes for an undefined `sparse`
  if (!grad.is_same(view) && !grad.is_same(sparse)) return;
  const at::NoGradGuard no_grad;
  grad.mul_(scale);
  base_reduced = false;
}

}  // namespace torch_ring
