#include "bindings/gradients.h"

#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <utility>

#include "bindings/gradient_allocator.h"

namespace torch_ring {
namespace {

using torch::autograd::variable_list;

/// What the Python exception of that name is to autograd.
struct AssertionError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override { return PyExc_AssertionError; }
};

bool get(const std::string& bitmap, std::size_t i) {
  return (static_cast<unsigned char>(bitmap.at(i / 8)) >> (i % 8)) & 1;
}

void set(std::string& bitmap, std::size_t i) {
  bitmap[i / 8] = static_cast<char>(bitmap[i / 8] | (1 << (i % 8)));
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

}  // namespace

class GradientHooks::Before final : public torch::autograd::FunctionPreHook {
 public:
  Before(std::weak_ptr<GradientHooks> hooks, std::size_t index)
      : hooks_(std::move(hooks)), index_(index) {}

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = hooks_.lock();
    if (hooks && grads[0].defined()) hooks->before_accumulation(index_);
    return grads;
  }

 private:
  const std::weak_ptr<GradientHooks> hooks_;
  const std::size_t index_;
};

class GradientHooks::After final : public torch::autograd::FunctionPostHook {
 public:
  After(std::weak_ptr<GradientHooks> hooks, std::size_t index)
      : hooks_(std::move(hooks)), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& grads) override {
    const auto hooks = hooks_.lock();
    if (hooks && grads[0].defined()) hooks->after_accumulation(index_);
    return outputs;
  }

 private:
  const std::weak_ptr<GradientHooks> hooks_;
  const std::size_t index_;
};

/// Ends the pass in which it was made: when autograd calls it, or, without a word to Python, when
/// autograd drops it because the pass has failed.
class GradientHooks::PassEnd {
 public:
  explicit PassEnd(std::weak_ptr<GradientHooks> hooks) : hooks_(std::move(hooks)) {}
  PassEnd(const PassEnd&) = delete;
  PassEnd& operator=(const PassEnd&) = delete;
  ~PassEnd() { close(); }

  void run() {
    struct Close {
      PassEnd& end;
      ~Close() { end.close(); }
    } const close{*this};
    if (const auto hooks = hooks_.lock()) hooks->options_.on_backward_end();
  }

 private:
  void close() {
    if (const auto hooks = std::exchange(hooks_, {}).lock()) hooks->end_pass();
  }

  std::weak_ptr<GradientHooks> hooks_;
};

std::shared_ptr<GradientHooks> GradientHooks::make(std::vector<at::Tensor> parameters,
                                                   std::vector<std::string> names,
                                                   Options options) {
  std::shared_ptr<GradientHooks> hooks(
      new GradientHooks(std::move(parameters), std::move(names), std::move(options)));
  hooks->add_hooks();
  return hooks;
}

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                             Options options)
    : options_(std::move(options)) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter parameter;
    parameter.variable = std::move(parameters[i]);
    parameter.name = std::move(names.at(i));
    parameter.dtype = parameter.variable.scalar_type();
    const bool frozen = !parameter.variable.requires_grad();
    if (frozen) parameter.variable.set_requires_grad(true);  // or it has no accumulator
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.variable);
    if (frozen) parameter.variable.set_requires_grad(false);
    parameters_.push_back(std::move(parameter));
  }
}

GradientHooks::~GradientHooks() {
  for (const Parameter& parameter : parameters_) {
    if (parameter.in_block) withdraw_gradient(parameter.accumulator.get());
  }
}

void GradientHooks::add_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& accumulator = *parameters_[i].accumulator;
    accumulator.add_post_hook(std::make_unique<After>(weak_from_this(), i));
    if (options_.reduced_scale != 1.0) {
      accumulator.add_pre_hook(std::make_unique<Before>(weak_from_this(), i));
    }
  }
}

void GradientHooks::place(const std::vector<at::Tensor>& buckets, const std::vector<Slot>& slots,
                          std::vector<bool> early) {
  const std::scoped_lock lock(mutex_);
  buckets_ = buckets;
  early_ = std::move(early);
  first_.assign(buckets.size(), 0);
  missing_.assign(buckets.size(), 0);
  streams_.assign(buckets.size(), std::nullopt);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const auto [bucket, offset] = slots.at(i);
    parameter.bucket = bucket;
    if (missing_.at(bucket)++ == 0) first_[bucket] = i;
    keep_place(parameter);
    if (parameter.in_block) continue;
    parameter.place = Place::in(buckets[bucket], offset, parameter.variable);
    if (buckets[bucket].numel() < parameter.variable.numel()) {
      parameter.in_block = true;
      allocate_gradient_in(options_.blocks, parameter.accumulator.get(), parameter.place.bytes());
      continue;
    }
    const at::Tensor before = std::exchange(parameter.view, parameter.place.view());
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (before.defined() && grad.is_same(before)) {
      copy_into(parameter.view, before);
      grad = parameter.view;
    }
    if (parameter.version) parameter.version = version_of(parameter.view);
  }
}

void GradientHooks::before_accumulation(std::size_t index) {
  if (disabled_) return;
  const std::scoped_lock lock(mutex_);
  keep_place(parameters_[index]);
  discount(parameters_[index]);
}

void GradientHooks::after_accumulation(std::size_t index) {
  if (disabled_) return;
  bool bucket_full = false;
  std::size_t bucket = 0;
  {
    const std::scoped_lock lock(mutex_);
    Parameter& parameter = parameters_[index];
    if (!parameter.variable.mutable_grad().defined()) return;  // another hook has consumed it
    keep_place(parameter);
    follow_streams(parameter);
    bucket_full = count_arrival(index, take(parameter));
    bucket = parameter.bucket;
  }
  if (!pass_open_.exchange(true)) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::make_shared<PassEnd>(weak_from_this())] { end->run(); });
  }
  if (bucket_full) options_.on_bucket_full(bucket);
}

/// Returns whether the bucket is full now and is to be announced.
bool GradientHooks::count_arrival(std::size_t index, bool fresh) {
  Parameter& parameter = parameters_[index];
  if (fresh) parameter.passes = 0;  // whatever had been accumulated was dropped
  if (fresh) parameter.base_reduced = false;
  if (passes_per_step_ > 1 && due(parameter) && !parameter.held) {
    throw AssertionError(c10::str(
        "the gradient of '", parameter.name, "' was computed more than backward_passes_per_step=",
        passes_per_step_, " times before step(): raise backward_passes_per_step, or call step() ",
        "or zero_grad() in between"));
  }
  ++parameter.passes;
  parameter.held = true;
  if (std::exchange(parameter.arrived, true)) {
    TORCH_CHECK(!early_.at(parameter.bucket) || missing_[parameter.bucket] > 0, "'", parameter.name,
                "' got another gradient in a backward pass that had already sent ",
                "its first one: use torch.utils.checkpoint with use_reentrant=False");
    return false;
  }
  arrived_.push_back(index);
  if (!synchronizing_ || !due(parameter) || parameter.sparse.defined()) return false;
  return --missing_[parameter.bucket] == 0 && early_.at(parameter.bucket);
}

void GradientHooks::end_pass() {
  const std::scoped_lock lock(mutex_);
  arrived_.clear();
  streams_.assign(streams_.size(), std::nullopt);
  std::fill(missing_.begin(), missing_.end(), 0);
  for (Parameter& parameter : parameters_) {
    parameter.arrived = false;
    ++missing_[parameter.bucket];
  }
  pass_open_ = false;
}

GradientHooks::Pending GradientHooks::pending(bool everything) {
  const std::scoped_lock lock(mutex_);
  const Bitmap none((parameters_.size() + 7) / 8, '\0');
  Pending pending{none, none, false};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& grad = parameter.variable.mutable_grad();
    keep_place(parameter);
    if (!grad.defined()) {  // zero_grad() of the model, not ours
      parameter.held = false;
      continue;
    }
    const bool ours = grad.is_same(parameter.view) || grad.is_same(parameter.sparse);
    if (everything && written_by_hand(parameter)) {
      parameter.held = true;
      parameter.base_reduced = false;
    }
    if (!parameter.held && (!everything || ours)) continue;
    if (everything || (synchronizing_ && due(parameter))) {
      set(pending.due, i);
      if (grad.is_sparse()) set(pending.sparse, i);
    } else {
      pending.held_back = true;
    }
  }
  return pending;
}

void GradientHooks::adopt(const Bitmap& touched) {
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!get(touched, i)) continue;
    Parameter& parameter = parameters_[i];
    keep_place(parameter);
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (parameter.arrived && !parameter.sparse.defined()) {
      grad = parameter.view;  // it may be on its way already, whatever `grad` was set to since
    } else if (!grad.defined()) {
      make_room(parameter);
      parameter.view.zero_();
      parameter.sparse.reset();
      grad = parameter.view;
    } else {
      if (!parameter.held) discount(parameter);
      move_in(parameter);
    }
  }
}

at::Tensor GradientHooks::memory(std::size_t bucket) {
  const std::scoped_lock lock(mutex_);
  Parameter& first = parameters_.at(first_.at(bucket));
  if (!first.in_block) return buckets_[bucket];
  if (!first.place.bucket.defined()) first.place.bucket = flat(first.view);
  return first.place.bucket;
}

at::Tensor GradientHooks::contribution(std::size_t index) {
  const std::scoped_lock lock(mutex_);
  Parameter& parameter = parameters_.at(index);
  keep_place(parameter);
  if (!parameter.held) discount(parameter);
  return parameter.variable.mutable_grad();
}

void GradientHooks::replace(std::size_t index, const at::Tensor& gradient) {
  const std::scoped_lock lock(mutex_);
  Parameter& parameter = parameters_.at(index);
  parameter.variable.mutable_grad() = parameter.sparse = gradient;
  parameter.held = false;
  parameter.base_reduced = true;
  parameter.version.reset();
}

void GradientHooks::reduced(const Bitmap& touched) {
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!get(touched, i)) continue;
    parameters_[i].held = false;
    parameters_[i].base_reduced = true;
    parameters_[i].version.reset();
    let_go(parameters_[i]);
  }
}

std::vector<std::size_t> GradientHooks::ready_order() {
  const std::scoped_lock lock(mutex_);
  return arrived_;
}

void GradientHooks::restart(bool gradients) {
  const std::scoped_lock lock(mutex_);
  for (Parameter& parameter : parameters_) {
    parameter.passes = 0;
    keep_place(parameter);
    parameter.version = version_of(parameter.view);
    let_go(parameter);
    if (!gradients) continue;
    parameter.held = parameter.base_reduced = false;
    parameter.sparse.reset();
  }
}

void GradientHooks::set_passes_per_step(int passes) {
  const std::scoped_lock lock(mutex_);
  passes_per_step_ = passes;
}

void GradientHooks::set_synchronizing(bool synchronizing) {
  const std::scoped_lock lock(mutex_);
  synchronizing_ = synchronizing;
}

void GradientHooks::disable() { disabled_ = true; }

/// A bucket has room for the shape that the parameter had, in the dtype that it had.
void GradientHooks::require_unchanged(Parameter& parameter) {
  const at::Tensor& grad = parameter.variable.mutable_grad();
  TORCH_CHECK_VALUE(grad.sizes() == parameter.place.sizes, "parameter '", parameter.name,
                    "' has changed its shape from ", c10::IntArrayRef(parameter.place.sizes), " to ", grad.sizes(),
                    " since the optimizer was wrapped: make a new optimizer and wrap that");
  TORCH_CHECK_VALUE(parameter.variable.scalar_type() == parameter.dtype, "parameter '",
                    parameter.name, "' has changed its dtype from ", parameter.dtype, " to ",
                    parameter.variable.scalar_type(),
                    " since the optimizer was wrapped: make a new optimizer and wrap that");
}

/// Whether the program, and no pass, has put something into the gradient in this step. What has
/// been reduced in this step may be written to: it is clipped, say.
bool GradientHooks::written_by_hand(const Parameter& parameter) {
  return !parameter.held && parameter.version &&
         parameter.variable.grad().is_same(parameter.view) &&
         *parameter.version != version_of(parameter.view);
}

/// The tensor that was our `grad` may have been given other memory (`grad.data = ...`, or a
/// module's double(), to() or share_memory()). Then it is somebody else's, and the place stays.
void GradientHooks::keep_place(Parameter& parameter) {
  if (parameter.in_block) return keep_block(parameter);
  if (!parameter.view.defined() || parameter.view.numel() == 0) return;
  if (parameter.view.const_data_ptr() == parameter.place.data) return;
  parameter.view = parameter.place.view();
}

/// Takes up what was let go, if it is `grad` still; forgets the block of a tensor that was given
/// other memory.
void GradientHooks::keep_block(Parameter& parameter) {
  if (parameter.view.defined()) {
    if (parameter.view.const_data_ptr() == parameter.place.data) return;
    parameter.view.reset();
    parameter.place.bucket.reset();
    return;
  }
  const at::Tensor& grad = parameter.variable.mutable_grad();
  const auto known = std::exchange(parameter.known, std::nullopt);
  if (known && grad.defined() && known->_unsafe_get_target() == grad.unsafeGetTensorImpl() &&
      grad.const_data_ptr() == parameter.place.data) {
    parameter.view = grad;
  }
}

/// Leaves a block to `grad`.
void GradientHooks::let_go(Parameter& parameter) {
  if (!parameter.in_block || !parameter.view.defined()) return;
  parameter.known.emplace(parameter.view.getIntrusivePtr());
  parameter.view.reset();
  parameter.place.bucket.reset();
}

/// Sees to it that there is a place.
void GradientHooks::make_room(Parameter& parameter) {
  if (parameter.view.defined()) return;
  parameter.place.move_to(options_.blocks->take(parameter.place.bytes()));
  parameter.view = parameter.place.view();
}

/// Whether a gradient that has just been accumulated can be reduced where it lies: in a block that
/// nobody else can reach. Autograd holds it a second time while it calls hooks.
bool GradientHooks::computed_in_block(const Parameter& parameter) const {
  const at::Tensor& grad = parameter.variable.grad();
  const Place& place = parameter.place;
  return grad.is_cpu() && grad.scalar_type() == place.dtype && grad.sizes() == place.sizes &&
         grad.strides() == place.strides && !grad.requires_grad() && !grad.is_neg() &&
         !grad.is_conj() && !grad._is_zerotensor() &&
         !grad.unsafeGetTensorImpl()->is_python_dispatch() && grad.storage_offset() == 0 &&
         grad.storage().nbytes() == place.bytes() && grad.storage().use_count() <= 2 &&
         options_.blocks->has_given(grad.const_data_ptr());
}

/// Receives what autograd has accumulated; returns whether it is another tensor than before.
bool GradientHooks::take(Parameter& parameter) {
  const at::Tensor& grad = parameter.variable.mutable_grad();
  if (parameter.in_block && !grad.is_same(parameter.view) && computed_in_block(parameter)) {
    require_unchanged(parameter);
    parameter.place.bucket.reset();
    parameter.place.data = static_cast<std::byte*>(grad.mutable_data_ptr());
    parameter.view = grad;
    parameter.sparse.reset();
    return true;
  }
  if (!grad.is_sparse()) return move_in(parameter);
  require_unchanged(parameter);
  const bool fresh = !grad.is_same(parameter.sparse);
  parameter.sparse = grad;
  return fresh;
}

/// A backward pass may run on several streams. Who fills a bucket sends it, and so must come after
/// the others: every arrival waits for the one before it.
void GradientHooks::follow_streams(const Parameter& parameter) {
  if (parameter.in_block || parameter.view.is_cpu()) return;
  const c10::Stream stream = current_stream(parameter.view.device());
  std::optional<c10::Stream>& last = streams_[parameter.bucket];
  if (last && *last != stream) {
    c10::Event arrived(stream.device_type());
    arrived.record(*last);
    arrived.block(stream);
  }
  last = stream;
}

/// Makes `grad` the place in the bucket, with its value; returns whether it was elsewhere.
bool GradientHooks::move_in(Parameter& parameter) {
  at::Tensor& grad = parameter.variable.mutable_grad();
  parameter.sparse.reset();
  if (grad.is_same(parameter.view)) return false;
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided || grad.is_sparse(), "the gradient of '",
                    parameter.name, "' has layout ", grad.layout(), ", which cannot be reduced");
  require_unchanged(parameter);
  make_room(parameter);
  copy_into(parameter.view, grad);
  grad = parameter.view;
  return true;
}

/// Sum counts what is equal on all ranks once (Options::reduced_scale).
void GradientHooks::discount(Parameter& parameter) {
  if (options_.reduced_scale == 1.0 || parameter.held || !parameter.base_reduced) return;
  at::Tensor& grad = parameter.variable.mutable_grad();
  if (!grad.defined()) return;  // which is_same() takes for an undefined `sparse`
  if (!grad.is_same(parameter.view) && !grad.is_same(parameter.sparse)) return;
  const at::NoGradGuard no_grad;
  grad.mul_(options_.reduced_scale);
  parameter.base_reduced = false;
}

}  // namespace torch_ring
