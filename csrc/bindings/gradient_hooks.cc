#include "bindings/gradient_hooks.h"

#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <utility>

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
    if (hooks && grads[0].defined()) hooks->after_accumulation(index_, grads[0]);
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
    parameters_.emplace_back(std::move(parameters[i]), std::move(names.at(i)));
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
    HookedParameter& parameter = parameters_[i];
    const auto [bucket, offset] = slots.at(i);
    parameter.bucket = bucket;
    if (missing_.at(bucket)++ == 0) first_[bucket] = i;
    parameter.keep_place();
    if (parameter.in_block()) continue;
    parameter.place = Place::in(buckets[bucket], offset, parameter.variable);
    if (buckets[bucket].numel() < parameter.variable.numel()) {
      parameter.direct = std::make_unique<DirectGradient>(
          options_.blocks, parameter.accumulator.get(), parameter.place.bytes());
      continue;
    }
    const at::Tensor before = std::exchange(parameter.view, parameter.place.view());
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (before.defined() && grad.is_same(before)) {
      copy_into(parameter.view, before);
      grad = parameter.view;
    }
    if (parameter.version) parameter.version = parameter.current_version();
  }
}

void GradientHooks::before_accumulation(std::size_t index) {
  if (disabled_) return;
  const std::scoped_lock lock(mutex_);
  parameters_[index].keep_place();
  discount(parameters_[index]);
}

void GradientHooks::after_accumulation(std::size_t index, const at::Tensor& gradient) {
  if (disabled_) return;
  bool bucket_full = false;
  std::size_t bucket = 0;
  {
    const std::scoped_lock lock(mutex_);
    HookedParameter& parameter = parameters_[index];
    if (!parameter.variable.mutable_grad().defined()) return;  // another hook has consumed it
    parameter.keep_place();
    follow_streams(parameter);
    bucket_full = count_arrival(index, parameter.take(gradient));
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
  HookedParameter& parameter = parameters_[index];
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
  for (HookedParameter& parameter : parameters_) {
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
    HookedParameter& parameter = parameters_[i];
    const at::Tensor& grad = parameter.variable.mutable_grad();
    parameter.keep_place();
    if (!grad.defined()) {  // zero_grad() of the model, not ours
      parameter.held = false;
      continue;
    }
    const bool ours = grad.is_same(parameter.view) || grad.is_same(parameter.sparse);
    if (everything && parameter.written_by_hand()) {
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
    HookedParameter& parameter = parameters_[i];
    parameter.keep_place();
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (parameter.arrived && parameter.view.defined() && !parameter.sparse.defined()) {
      grad = parameter.view;  // it may be on its way already, whatever `grad` was set to since
    } else if (!grad.defined()) {
      parameter.make_zero();
    } else {
      if (!parameter.held) discount(parameter);
      parameter.move_in();
    }
  }
}

at::Tensor GradientHooks::memory(std::size_t bucket) {
  const std::scoped_lock lock(mutex_);
  HookedParameter& first = parameters_.at(first_.at(bucket));
  if (!first.in_block()) return buckets_[bucket];
  if (!first.place.bucket.defined()) first.place.bucket = flat(first.view);
  return first.place.bucket;
}

at::Tensor GradientHooks::contribution(std::size_t index) {
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_.at(index);
  parameter.keep_place();
  if (!parameter.held) discount(parameter);
  return parameter.variable.mutable_grad();
}

void GradientHooks::replace(std::size_t index, const at::Tensor& gradient) {
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_.at(index);
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
    parameters_[i].let_go();
  }
}

std::vector<std::size_t> GradientHooks::ready_order() {
  const std::scoped_lock lock(mutex_);
  return arrived_;
}

void GradientHooks::restart(bool gradients) {
  const std::scoped_lock lock(mutex_);
  for (HookedParameter& parameter : parameters_) {
    parameter.passes = 0;
    parameter.keep_place();
    parameter.version.reset();
    if (parameter.view.defined()) parameter.version = parameter.current_version();
    parameter.let_go();
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

/// A backward pass may run on several streams. Who fills a bucket sends it, and so must come after
/// the others: every arrival waits for the one before it.
void GradientHooks::follow_streams(const HookedParameter& parameter) {
  if (parameter.in_block() || parameter.view.is_cpu()) return;
  const c10::Stream stream = current_stream(parameter.view.device());
  std::optional<c10::Stream>& last = streams_[parameter.bucket];
  if (last && *last != stream) {
    c10::Event arrived(stream.device_type());
    arrived.record(*last);
    arrived.block(stream);
  }
  last = stream;
}

}  // namespace torch_ring
