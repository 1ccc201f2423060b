// SPDX-License-Identifier: Apache-2.0
#include "gradients/gradient_hooks.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "bindings/accelerator.h"
#include "gradients/accumulator_hooks.h"
#include "gradients/python_errors.h"

namespace torch_ring {

namespace {

constexpr const char* kTwoThreads =
    "two threads run backward passes of wrapped optimizers at the same time, and the ranks cannot "
    "know which pass of theirs belongs to which: run backward() to step() of all optimizers in one "
    "thread, or one after the other, in the same order on all ranks";

/// Counts the reductions of this process; guards no other data.
std::atomic<std::uint64_t> reductions{0};

constexpr const char* kCameLate =
    "got another gradient in a backward pass that had already sent its first one, and which hosts "
    "run ahead of: wrap the optimizer with run_ahead=False (or set TORCH_RING_RUN_AHEAD=0), or use "
    "torch.utils.checkpoint with use_reentrant=False";

constexpr const char* kChanged =
    "', which has a part that is averaged and one that is not (computed under no_sync(), or in a "
    "pass that failed): op=Sum would count the averaged part once for each rank. Call "
    "optimizer.synchronize() before such a change, or zero_grad() after the average";

/// The name of the node that runs the backward graph of torch.compile (AOTAutograd's).
constexpr const char* kCompiled = "CompiledFunctionBackward";

/// Throws if a parameter has another shape than when it was wrapped; otherwise the next pass would
/// fail with an error of autograd's.
void require_shape(const HookedParameter& parameter) {
  const at::IntArrayRef wrapped(parameter.view.sizes);
  TORCH_CHECK_VALUE(parameter.variable.sizes() == wrapped, "parameter '", parameter.name,
                    "' has changed its shape from ", wrapped, " to ", parameter.variable.sizes(),
                    " since the optimizer was wrapped: make a new optimizer and wrap that");
}

/// Refuses a gradient with a graph: the reduced one would have none, so a term that the program
/// computes from it (a penalty) would count as a constant.
void require_no_graph(const HookedParameter& parameter) {
  if (!at::GradMode::is_enabled() || !parameter.variable.grad().requires_grad()) return;
  throw_runtime_error(c10::str(
      "backward(create_graph=True): the gradient of '", parameter.name, "' would lose its graph ",
      "when the ranks average it. For a penalty, compute the gradients with ",
      "torch.autograd.grad(loss, parameters, create_graph=True), average them with ",
      "hvd.grouped_allreduce(), and call backward() of the whole loss without create_graph"));
}

}  // namespace

/// Ends the backward pass in which it was made, when autograd calls it, or when autograd drops it
/// because the pass has failed, here or before. In the latter case Python is not called. A nested
/// pass does not end the outer one: when autograd drops the nested graph, whose callback this is,
/// the outer graph is the current one again, and gets a callback of its own.
class GradientHooks::EndCallback {
 public:
  /// `number`: of the pass.
  EndCallback(std::weak_ptr<GradientHooks> hooks, std::uint64_t number)
      : hooks_(std::move(hooks)), number_(number) {}
  EndCallback(const EndCallback&) = delete;
  EndCallback& operator=(const EndCallback&) = delete;
  ~EndCallback() {
    const auto hooks = goes_on_ ? std::exchange(hooks_, {}).lock() : nullptr;
    try {
      hooks ? hooks->go_on(number_) : close(true);
    } catch (...) {  // torch cannot put a gradient's parts together; its pass has failed already
    }
  }

  void run() {
    goes_on_ = is_nested();
    if (goes_on_) return;
    if (const auto hooks = hooks_.lock()) {
      hooks->options_.on_backward_end();
      hooks->bring_in_rest();
    }
    close(false);
  }

 private:
  void close(bool failed) {
    if (const auto hooks = std::exchange(hooks_, {}).lock()) hooks->close_pass(number_, failed);
  }

  std::weak_ptr<GradientHooks> hooks_;
  const std::uint64_t number_;
  bool goes_on_ = false;
};

GradientHooks::~GradientHooks() = default;

std::shared_ptr<GradientHooks> GradientHooks::make(std::vector<at::Tensor> parameters,
                                                   std::vector<std::string> names,
                                                   Options options) {
  std::shared_ptr<GradientHooks> hooks(
      new GradientHooks(std::move(parameters), std::move(names), std::move(options)));
  for (std::size_t i = 0; i < hooks->parameters_.size(); ++i) {
    const HookedParameter& parameter = hooks->parameters_[i];
    hook_parameter(hooks, i, parameter.variable, *parameter.accumulator);
  }
  return hooks;
}

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                             Options options)
    : options_(std::move(options)),
      is_lent_(parameters.size()),
      present_(parameters.size()),
      finite_(options_.largest) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters_.emplace_back(std::move(parameters[i]), std::move(names.at(i)));
  }
}

void GradientHooks::set_buckets(const std::vector<at::Tensor>& buckets,
                                const std::vector<Slot>& slots, const std::vector<bool>& early) {
  const std::scoped_lock lock(mutex_);
  buckets_.clear();
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    buckets_.push_back({.memory = buckets[i], .is_early = early.at(i)});
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    HookedParameter& parameter = parameters_[i];
    const auto [bucket, offset] = slots.at(i);
    parameter.bucket = bucket;
    buckets_.at(bucket).members.push_back(i);
    parameter.refresh();
    const bool in_block = buckets[bucket].numel() < parameter.variable.numel();
    if (in_block && parameter.in_block()) continue;
    if (parameter.has_moved()) parameter.arrived = false;  // in this pass, not in a bucket
    parameter.device = in_block ? c10::Device(c10::kCPU) : buckets[bucket].device();
    if (in_block) {
      parameter.view = GradientView::in(buckets[bucket], offset, parameter.variable);
      parameter.bucket_view.reset();
      expect_in_block(parameter);
    } else {
      parameter.direct.reset();
      parameter.lie_in(GradientView::in(buckets[bucket], offset, parameter.variable));
    }
  }
  count_missing();
}

void GradientHooks::expect_in_block(HookedParameter& parameter) {
  parameter.direct = std::make_unique<DirectGradient>(options_.blocks, parameter.accumulator.get(),
                                                      parameter.view.bytes());
}

bool GradientHooks::follow(std::size_t index, const Accumulator& accumulator) {
  if (disabled_) return false;
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_[index];
  hook_accumulator(weak_from_this(), index, *accumulator);
  parameter.follow(accumulator);
  if (parameter.in_block()) expect_in_block(parameter);
  return true;
}

void GradientHooks::before_accumulation(std::size_t index) {
  const at::Tensor& grad = parameters_[index].variable.grad();
  present_[index].store(grad.defined() ? grad.unsafeGetTensorImpl() : nullptr,
                        std::memory_order_relaxed);
  HookedParameter& parameter = parameters_[index];
  if (is_ignored(index)) return;
  if (may_have_changes_.load(std::memory_order_relaxed)) {
    const std::scoped_lock lock(mutex_);
    note_changes();
  }
  if (parameter.arrived) return save_sent(index);
  if (parameter.averaged.is_none()) return;
  std::unique_lock lock(mutex_);
  enter_pass(lock, parameter.variable.device());  // its end puts both parts together again
  parameter.refresh();
  parameter.carry();
}

void GradientHooks::after_accumulation(std::size_t index, const at::Tensor& gradient) {
  if (is_ignored(index)) return;
  bool bucket_full = false;
  bool is_planned = false;
  std::size_t bucket = 0;
  {
    std::unique_lock lock(mutex_);
    if (is_elsewhere(index)) return;
    HookedParameter& parameter = parameters_[index];
    const at::Tensor& grad = parameter.variable.mutable_grad();
    if (!grad.defined()) return;  // another hook has taken it
    require_no_graph(parameter);
    const bool is_new =
        present_[index].load(std::memory_order_relaxed) != grad.unsafeGetTensorImpl();
    enter_pass(lock, parameter.variable.device());
    if (parameter.saved.defined()) {
      if (!plan_.gradients) return arrive_late(index);
      lock.unlock();
      options_.fail("'" + parameter.name + "' " + kCameLate);
    }
    parameter.refresh();
    bucket = parameter.bucket;
    if (!parameter.on_device()) {
      BatchedCopy none;
      spare_kept(lock, index, none);
    } else if (!parameter.has_moved()) {
      buckets_[bucket].producers.add(current_stream(parameter.device));
    }
    bucket_full = count_arrival(index, parameter.on_gradient(gradient, is_new));
    if (bucket_full) complete(lock, bucket);
    if (bucket_full && finite_.is_on()) finite_.examine(parameters_, buckets_[bucket].members);
    pass_.is_sent = pass_.is_sent || bucket_full;
    is_planned = plan_.gradients.has_value();
  }
  if (!bucket_full) return;
  is_planned ? options_.launch(*this, bucket) : options_.on_bucket_full(bucket);
}

/// Begins the current backward pass if this is its first gradient. Fails the job if the gradient
/// would mix with one of another pass, in another thread or in a bucket in flight. Throws if the
/// pass is captured into a graph.
void GradientHooks::enter_pass(std::unique_lock<std::mutex>& lock, c10::Device device) {
  const BackwardGraph current = BackwardGraph::current();
  if (!pass_.is_under_way()) {
    lock.unlock();
    if (const auto problem = capture_problem(device, Captured::kBackward)) {
      throw_value_error(*problem);
    }
    lock.lock();
  }
  if (!pass_.is_under_way()) {
    pass_.begin(current, options_.agreement->number());
    may_have_changes_ = false;
    const std::uint64_t number = pass_.number;
    lock.unlock();
    queue_end(number);
    lock.lock();
  }
  pass_.has_nested = pass_.has_nested || is_nested();
  const bool two_threads =
      options_.agreement->is_ending_elsewhere() || pass_.graph->is_beside(current);
  if (!two_threads && !has_sent_in_vain()) return;
  const std::string why = two_threads ? kTwoThreads : failure();
  lock.unlock();
  options_.fail(why);
}

/// Makes autograd end pass `number` when its present graph in this thread ends.
void GradientHooks::queue_end(std::uint64_t number) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = std::make_shared<EndCallback>(weak_from_this(), number)] { end->run(); });
}

/// After a nested graph: the pass goes on in the outer one. If this is impossible, the gradients
/// are reduced in step().
void GradientHooks::go_on(std::uint64_t number) {
  const int task = BackwardGraph::current().task;
  {
    const std::scoped_lock lock(mutex_);
    if (!pass_.is_under_way() || number != pass_.number) return;
    if (task >= 0) {
      pass_.graph->task = task;
      pass_.end = current_end();
    }
  }
  if (task < 0) return close_pass(number, /*failed=*/true);
  try {
    queue_end(number);
  } catch (...) {  // in a destructor
    close_pass(number, /*failed=*/true);
  }
}

/// Before a parameter of a bucket that has been sent gets another gradient, in a nested graph or in
/// the outer one: keeps autograd from writing to the bucket.
void GradientHooks::save_sent(std::size_t index) {
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_[index];
  if (!buckets_[parameter.bucket].is_sent) return;
  parameter.saved = std::exchange(parameter.variable.mutable_grad(), {});
}

/// Keeps such a gradient, to be reduced after the bucket.
void GradientHooks::arrive_late(std::size_t index) {
  const at::NoGradGuard no_grad;
  HookedParameter& parameter = parameters_[index];
  at::Tensor mine =
      std::exchange(parameter.variable.mutable_grad(), std::exchange(parameter.saved, {}));
  if (mine.is_sparse()) mine = mine.to_dense();
  at::Tensor& kept = pass_.late[index];
  kept = kept.defined() ? kept.add(mine) : mine;
  pass_.repeated.insert(index);
}

/// Returns whether the bucket has become full and on_bucket_full is due.
bool GradientHooks::count_arrival(std::size_t index, bool fresh) {
  HookedParameter& parameter = parameters_[index];
  if (fresh) parameter.passes = 0;  // the earlier gradient was dropped
  if ((fresh || parameter.averaged.is_whole()) && !parameter.averaged.is_apart()) {
    parameter.averaged.forget();
  }
  parameter.unreduced = parameter.unreduced || parameter.arrived;
  if (parameter.arrived) {  // computed by two nested graphs, or by a nested and an outer one
    pass_.repeated.insert(index);
    parameter.passes = std::max(parameter.passes, 1);
    return false;
  }
  const bool too_many = step_.passes > 1 && due(parameter) && !parameter.unreduced;
  if (too_many && !parameter.averaged.carries_value()) {
    parameter.passes = 0;  // the earlier gradient was zeroed, after a step that GradScaler skipped
  } else if (too_many) {
    throw_assertion_error(c10::str(
        "the gradient of '", parameter.name, "' was computed more than backward_passes_per_step=",
        step_.passes, " times before step(): raise backward_passes_per_step, or call step() ",
        "or zero_grad() in between"));
  }
  ++parameter.passes;
  parameter.unreduced = true;
  if (step_.is_synchronizing && due(parameter)) options_.agreement->arrive();
  if (plan_.gradients && !plan_.gradients->get(index)) return false;
  parameter.arrived = true;
  pass_.arrived.push_back(index);
  if (!step_.is_synchronizing || !due(parameter) || parameter.sparse.defined()) return false;
  if (parameter.has_moved() || parameter.averaged.is_changed() || !pass_.late.empty()) return false;
  if (at::GradMode::is_enabled()) return false;  // require_no_graph() may refuse a later one
  Bucket& bucket = buckets_[parameter.bucket];
  if (--bucket.missing > 0 || !bucket.is_early || pass_.has_nested || may_get_late(bucket))
    return false;
  bucket.is_sent = true;
  return true;
}

/// Whether a parameter of the bucket may get another gradient in this pass, as in an earlier pass.
bool GradientHooks::may_get_late(const Bucket& bucket) const {
  return !pass_.repeated.empty() && std::ranges::any_of(bucket.members, [&](std::size_t i) {
    return pass_.repeated.contains(i);
  });
}

void GradientHooks::set_elsewhere(std::map<std::size_t, Elsewhere> slots) {
  const std::scoped_lock lock(mutex_);
  const bool is_same = std::ranges::all_of(slots, [&](const auto& slot) {
    const auto present = elsewhere_.find(slot.first);
    return present != elsewhere_.end() && present->second.hooks == slot.second.hooks;
  });
  if (is_same && slots.size() == elsewhere_.size()) return;
  close_failed();
  note_changes();
  TORCH_CHECK_VALUE(!pass_.is_under_way(), "two optimizers have '",
                    parameters_.at(slots.begin()->first).name,
                    "', and the second one is wrapped in the middle of a backward pass, which has "
                    "sent a part of the gradients by the first one: wrap it before or after");
  for (const auto& [index, there] : slots) {
    const auto before = elsewhere_.find(index);
    const bool was_here = before == elsewhere_.end();
    if (!was_here && before->second.hooks == there.hooks) continue;
    GradientHooks& owner = *there.hooks;
    owner.is_lent_.at(there.index) = true;
    const std::scoped_lock lock(owner.mutex_);
    owner.may_have_changes_ = true;
    HookedParameter& slot = owner.parameters_.at(there.index);
    if (was_here) slot.take_over(parameters_.at(index), owner.step_.passes);
  }
  elsewhere_ = std::move(slots);
  count_missing();
}

std::uint64_t GradientHooks::step_began() {
  const std::scoped_lock lock(mutex_);
  return step_.began;
}

/// The slots in `other` that belong to parameters of these hooks.
Bitmap GradientHooks::slots_in(const GradientHooks& other) {
  const std::scoped_lock lock(mutex_);
  Bitmap found;
  for (const auto& [index, there] : elsewhere_) {
    if (there.hooks.get() == &other) found.set(there.index);
  }
  return found;
}

/// Whether a gradient has been reduced since a step began that another optimizer takes, or is due.
bool GradientHooks::is_ready(std::size_t index, std::uint64_t since, bool stepping) {
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_.at(index);
  parameter.refresh();
  if (!parameter.variable.grad().defined()) return false;
  if (parameter.unreduced) return stepping || (step_.is_synchronizing && due(parameter));
  return parameter.reduced_at > since;
}

/// reset() of one parameter, for another optimizer.
void GradientHooks::reset_slot(std::size_t index, bool gradients) {
  const std::scoped_lock lock(mutex_);
  begin_step(parameters_.at(index), gradients);
  if (gradients) pass_.late.erase(index);
}

void GradientHooks::close_pass(std::uint64_t number, bool failed) {
  const std::scoped_lock lock(mutex_);
  if (pass_.is_under_way() && number == pass_.number) close(failed);
}

/// Closes a failed pass that autograd has not dropped yet: a thread of a device may hold it for a
/// while after backward() has raised. The caller, outside of backward passes, is about to step or
/// to drop the gradients, so no pass that produces some is under way.
void GradientHooks::close_failed() {
  const BackwardGraph current = BackwardGraph::current();
  if (pass_.is_under_way() && current.task < 0 && !pass_.graph->is_beside(current)) close(true);
}

void GradientHooks::close(bool failed) {
  // An error of the agreed reduction is one on all ranks, which are in the next pass together: but
  // these buckets may be in flight.
  const bool is_agreed = pass_.agreement != options_.agreement->number();
  if (failed && is_agreed) {
    pass_.is_sent_in_vain = pass_.is_sent_in_vain || pass_.is_sent;
  } else if (failed) {
    options_.agreement->give_up(failure_in(pass_.end), pass_.is_sent);
  }
  pass_.close(failed);
  finite_.forget();
  for (Bucket& bucket : buckets_) bucket.producers.clear();
  for (HookedParameter& parameter : parameters_) {
    parameter.arrived = parameter.made = false;
    if (parameter.saved.defined()) {  // autograd has failed to make another one
      parameter.variable.mutable_grad() = std::exchange(parameter.saved, {});
    }
  }
  count_missing();
  std::vector<HookedParameter*> joined;
  for (HookedParameter& parameter : parameters_) {
    const bool was_apart = parameter.averaged.is_apart();
    parameter.rejoin();
    if (parameter.averaged.is_both()) may_have_changes_ = true;
    // A gradient in the program's memory shares its version with others, which have changed.
    if (was_apart || parameter.is_given()) joined.push_back(&parameter);
  }
  for (HookedParameter* const parameter : joined) parameter->note_version();
  pass_.has_failed = failed && std::ranges::any_of(parameters_, &HookedParameter::unreduced);
}

/// Gives the bucket other memory before a gradient overwrites an earlier one that the program
/// keeps. Releases the lock meanwhile. `copies`: the copies collected for the old memory.
void GradientHooks::spare_kept(std::unique_lock<std::mutex>& lock, std::size_t index,
                               BatchedCopy& copies) {
  if (!parameters_[index].would_overwrite_kept()) return;
  copies.run();
  const std::size_t bucket = parameters_[index].bucket;
  lock.unlock();
  options_.await_launched(*this, bucket);
  const at::Tensor memory = options_.new_memory(bucket);
  lock.lock();
  auto* const begin = static_cast<std::byte*>(memory.mutable_data_ptr());
  const auto* const before =
      static_cast<const std::byte*>(buckets_[bucket].memory.const_data_ptr());
  for (HookedParameter& parameter : parameters_) {
    if (parameter.bucket != bucket) continue;
    parameter.refresh();
    GradientView view = parameter.view;
    view.data = begin + (view.data - before);
    view.bucket = memory;
    parameter.lie_in(std::move(view));
  }
  buckets_[bucket].memory = memory;
}

void GradientHooks::refuse_others_pass() {
  std::string why;
  {
    const std::scoped_lock lock(mutex_);
    const bool is_beside = pass_.is_under_way() && pass_.graph->is_beside(BackwardGraph::current());
    if (is_beside || has_sent_in_vain()) why = is_beside ? kTwoThreads : failure();
  }
  if (!why.empty()) options_.fail(why);
}

bool GradientHooks::parameters_moved() {
  const std::scoped_lock lock(mutex_);
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const HookedParameter& parameter) { return parameter.has_moved(); });
}

GradientHooks::Pending GradientHooks::pending(Due which,
                                              const std::shared_ptr<GradientHooks>& stepping) {
  const Bitmap stepped = stepping ? stepping->slots_in(*this) : Bitmap();
  const std::uint64_t began = stepping ? stepping->step_began() : 0;
  const std::scoped_lock lock(mutex_);
  const bool is_of_step = which == Due::kEverything || stepped.any();
  if (is_of_step) close_failed();
  note_changes();
  const bool is_beside = pass_.is_under_way() && pass_.graph->is_beside(BackwardGraph::current());
  const bool unready = is_beside || (is_of_step && has_sent_in_vain());
  Pending pending{{}, {}, {}, {}, false, true, !pass_.late.empty(), unready};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_elsewhere(i)) {
      const Elsewhere& there = elsewhere_.at(i);
      const bool is_stepping = which == Due::kEverything;
      pending.complete =
          pending.complete && there.hooks->is_ready(there.index, step_.began, is_stepping);
      continue;
    }
    if (is_ignored(i)) continue;
    HookedParameter& parameter = parameters_[i];
    const bool everything = which == Due::kEverything || stepped.get(i);
    const bool was_reduced = parameter.reduced_at > (stepped.get(i) ? began : step_.began);
    const at::Tensor& grad = parameter.variable.mutable_grad();
    parameter.refresh();
    pending.unready = pending.unready || parameter.has_moved();
    if (!pass_.is_under_way() && parameter.averaged.is_apart()) {  // its reduction has failed
      parameter.rejoin();
      parameter.note_version();
      may_have_changes_ = true;
    }
    if (!grad.defined()) {  // dropped by the model's zero_grad(), not the optimizer's
      parameter.unreduced = false;
      parameter.averaged.forget();
      parameter.reduced_at = 0;  // so the next gradient is a new one
      parameter.outside.reset();
      pending.complete = false;
      continue;
    }
    if (everything && !was_reduced && parameter.written_by_hand()) {
      parameter.unreduced = true;
      parameter.averaged.forget();
    }
    const bool by_hand = everything && parameter.may_be_by_hand(was_reduced);
    if (parameter.has_average() && !by_hand) pending.carried.set(i);
    if (parameter.averaged.is_unsure()) pending.unsure.set(i);
    if (!parameter.unreduced && !by_hand) {
      pending.complete = pending.complete && was_reduced;
      continue;
    }
    const bool started = which == Due::kBegun;
    if (everything || (step_.is_synchronizing && (started || due(parameter)))) {
      pending.due.set(i);
      if (grad.is_sparse()) pending.sparse.set(i);
    } else {
      pending.accumulating = true;
    }
  }
  return pending;
}

GradientReport GradientHooks::report(const Pending& pending, std::size_t optimizer,
                                     bool is_stepping, bool orders, int rank) {
  const std::scoped_lock lock(mutex_);
  GradientReport report{
      .optimizer = optimizer,
      .due = pending.due,
      .sparse = pending.sparse,
      .accumulating = pending.accumulating,
      .incomplete = !pending.complete,
      .stepping = is_stepping,
      .late = pending.late,
      .carried = pending.carried,
      .unsure = pending.unsure,
      .not_finite = finite_.not_finite(parameters_, pending.due, rank),
  };
  if (orders) report.order.assign(pass_.arrived.begin(), pass_.arrived.end());
  return report;
}

std::vector<std::size_t> GradientHooks::set_by_hand() {
  const std::scoped_lock lock(mutex_);
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_elsewhere(i)) {
      const Elsewhere& there = elsewhere_.at(i);
      if (there.hooks->is_by_hand(there.index, step_.began)) found.push_back(i);
    } else if (parameters_[i].is_by_hand(step_.began)) {
      found.push_back(i);
    }
  }
  return found;
}

bool GradientHooks::is_by_hand(std::size_t index, std::uint64_t since) {
  const std::scoped_lock lock(mutex_);
  return parameters_.at(index).is_by_hand(since);
}

at::Tensor GradientHooks::memory(std::size_t bucket) {
  const std::scoped_lock lock(mutex_);
  HookedParameter& first = parameters_.at(buckets_.at(bucket).members.front());
  if (!first.in_block()) return buckets_[bucket].memory;
  if (!first.view.bucket.defined()) first.view.bucket = flat(first.bucket_view);
  return first.view.bucket;
}

at::Tensor GradientHooks::bucket_view(std::size_t index) {
  const std::scoped_lock lock(mutex_);
  return parameters_.at(index).view.tensor();
}

at::Tensor GradientHooks::local_gradient(std::size_t index, double scale) {
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_.at(index);
  parameter.refresh();
  parameter.rescale_averaged(scale);
  return parameter.variable.mutable_grad();
}

void GradientHooks::require_unchanged(const Bitmap& touched) {
  std::string why;
  {
    const std::scoped_lock lock(mutex_);
    why = change_among(touched);
  }
  if (!why.empty()) options_.fail(why);
}

void GradientHooks::carry(const Bitmap& carried) {
  if (!carried.any()) return;
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!carried.get(i)) continue;
    parameters_[i].refresh();
    parameters_[i].carry();
  }
}

void GradientHooks::drop_averaged(const Bitmap& dropped) {
  if (!dropped.any()) return;
  carry(dropped);
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (dropped.get(i)) parameters_[i].averaged.forget();
  }
}

at::Tensor GradientHooks::carried_part(std::size_t index) {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_.at(index);
  const auto options = at::TensorOptions().dtype(parameter.view.dtype).device(parameter.device);
  at::Tensor part = at::zeros(parameter.view.sizes, options);
  if (parameter.averaged.is_apart()) add_to(part, parameter.averaged.value());
  parameter.averaged.replace(part);
  return flat(part);
}

at::Tensor GradientHooks::sparse_carried(std::size_t index) {
  const std::scoped_lock lock(mutex_);
  const HookedParameter& parameter = parameters_.at(index);
  return parameter.averaged.is_apart() ? parameter.averaged.value() : at::Tensor();
}

void GradientHooks::set_sparse_carried(std::size_t index, at::Tensor part) {
  const std::scoped_lock lock(mutex_);
  parameters_.at(index).averaged.replace(std::move(part));
}

void GradientHooks::set_sparse_result(std::size_t index, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(mutex_);
  HookedParameter& parameter = parameters_.at(index);
  at::Tensor& grad = parameter.variable.mutable_grad();
  grad = gradient;
  if (parameter.averaged.is_apart()) {
    add_to(grad, parameter.averaged.value());
    if (grad.is_sparse()) grad = grad.coalesce();  // else repeated passes would multiply its rows
  }
  parameter.sparse = grad;
  parameter.outside.reset();
  parameter.be_reduced(++reductions);
}

void GradientHooks::mark_reduced(const Bitmap& touched) {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(mutex_);
  const std::uint64_t now = ++reductions;
  pass_.is_sent = false;
  finite_.forget();
  BatchedCopy copies;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!touched.get(i)) continue;
    HookedParameter& parameter = parameters_[i];
    if (parameter.averaged.is_apart()) add_to(parameter.bucket_view, parameter.averaged.value());
    parameter.write_back(copies);
    parameter.be_reduced(now);
    parameter.release_to_grad();
  }
  copies.run();
}

std::vector<std::size_t> GradientHooks::compiled_together() {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return {};
  std::unordered_map<const Node*, std::size_t> accumulators;
  {
    const std::scoped_lock lock(mutex_);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      accumulators.emplace(parameters_[i].accumulator.get(), i);
    }
  }
  std::vector<std::size_t> most;
  const Node* producer = nullptr;
  for (const Node* const node : *nodes) {
    std::vector<std::size_t> own;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      const auto found = accumulators.find(edge.function.get());
      if (found != accumulators.end()) own.push_back(found->second);
    }
    if (own.size() <= most.size()) continue;
    most = std::move(own);
    producer = node;
  }
  // Not one name for each node: for a node in Python it takes the GIL.
  if (producer == nullptr || producer->name() != kCompiled) return {};
  return most;
}

void GradientHooks::reset(bool gradients) {
  std::map<std::size_t, Elsewhere> elsewhere;
  {
    const std::scoped_lock lock(mutex_);
    if (gradients) close_failed();
    pass_.has_failed = false;
    elsewhere = elsewhere_;
    step_.began = reductions;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (is_elsewhere(i)) continue;
      begin_step(parameters_[i], gradients);
    }
    if (gradients) pass_.late.clear();
  }
  for (const auto& [index, there] : elsewhere) there.hooks->reset_slot(there.index, gradients);
}

/// reset() of one parameter.
void GradientHooks::begin_step(HookedParameter& parameter, bool gradients) {
  parameter.passes = 0;
  parameter.refresh();
  parameter.version.reset();
  if (parameter.bucket_view.defined() || parameter.is_given()) {
    parameter.version = parameter.current_version();
  }
  parameter.release_to_grad();
  parameter.is_zero = gradients;
  if (!gradients) return;
  parameter.reduced_at = 0;
  require_shape(parameter);
  // Zeros that replace a gradient of this rank alone: the others must get them, too.
  parameter.unreduced = parameter.unreduced && parameter.variable.mutable_grad().defined();
  parameter.averaged.forget();
  parameter.sparse.reset();
  parameter.outside.reset();
}

void GradientHooks::restart_passes() {
  const std::scoped_lock lock(mutex_);
  for (HookedParameter& parameter : parameters_) parameter.passes = 0;
}

void GradientHooks::set_passes_per_step(int passes) {
  const std::scoped_lock lock(mutex_);
  step_.passes = passes;
}

void GradientHooks::set_synchronizing(bool synchronizing) {
  std::map<std::size_t, Elsewhere> elsewhere;
  {
    const std::scoped_lock lock(mutex_);
    step_.is_synchronizing = synchronizing;
    elsewhere = elsewhere_;
  }
  for (const auto& [index, there] : elsewhere) {  // of others that are gone, but for their slots
    if (there.hooks->is_left_) there.hooks->set_synchronizing(synchronizing);
  }
}

void GradientHooks::disable() { disabled_ = true; }

/// Completes a bucket whose gradients have all arrived: copies those that were left outside.
void GradientHooks::complete(std::unique_lock<std::mutex>& lock, std::size_t bucket) {
  const c10::Device device = parameters_[buckets_[bucket].members.front()].device;
  if (!device.is_cpu()) buckets_[bucket].producers.join(current_stream(device));
  BatchedCopy copies;
  for (const std::size_t i : buckets_[bucket].members) {
    if (!parameters_[i].outside.defined()) continue;
    parameters_[i].refresh();
    spare_kept(lock, i, copies);
    parameters_[i].bring_in(copies);
  }
  copies.run();
}

void GradientHooks::move_into_buckets(const Bitmap& touched, double scale) {
  std::unique_lock lock(mutex_);
  BatchedCopy copies;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!touched.get(i)) continue;
    HookedParameter& parameter = parameters_[i];
    parameter.refresh();
    if (!parameter.arrived || parameter.outside.defined()) spare_kept(lock, i, copies);
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (parameter.is_in_pass()) {
      // Its bucket may be in flight already, even if `grad` has been replaced since.
      parameter.bring_in(copies);
      if (!parameter.is_given()) grad = parameter.bucket_view;
    } else if (!grad.defined()) {
      parameter.make_zero(copies);
    } else {
      parameter.rescale_averaged(scale);
      parameter.copy_in(copies);
    }
  }
  copies.run();
}

/// Copies the gradients that are not due yet into their buckets at the end of the pass, so that
/// only the buckets' memory stays in use. Autograd has made the current stream follow all others of
/// the pass.
void GradientHooks::bring_in_rest() {
  std::unique_lock lock(mutex_);
  BatchedCopy copies;
  for (const std::size_t i : pass_.arrived) {
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

/// Finds the gradients that the program has changed since the last pass, before this one changes
/// any.
void GradientHooks::note_changes() {
  if (pass_.is_under_way() || !may_have_changes_) return;  // another parameter's hook has done it
  for (HookedParameter& parameter : parameters_) parameter.note_changes(options_.sums);
}

/// The reason why these gradients cannot be reduced; empty if there is none.
std::string GradientHooks::change_among(const Bitmap& touched) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!touched.get(i) || !parameters_[i].averaged.is_changed()) continue;
    return "the program has changed the gradient of '" + parameters_[i].name + kChanged;
  }
  return {};
}

bool GradientHooks::has_failed() {
  const std::scoped_lock lock(mutex_);
  close_failed();
  return pass_.has_failed;
}

void GradientHooks::doubt_averages() {
  const std::scoped_lock lock(mutex_);
  for (HookedParameter& parameter : parameters_) {
    parameter.refresh();
    parameter.averaged.doubt(parameter.has_average());
    if (!parameter.unreduced) parameter.release_to_grad();
  }
}

void GradientHooks::expect(std::optional<Bitmap> planned) {
  const std::scoped_lock lock(mutex_);
  plan_.gradients = std::move(planned);
  count_missing();
}

/// Counts the gradients that each bucket waits for, at the beginning of a pass.
void GradientHooks::count_missing() {
  for (Bucket& bucket : buckets_) {
    bucket.missing = 0;
    bucket.is_sent = false;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_expected = !plan_.gradients || plan_.gradients->get(i);
    if (is_expected && !is_elsewhere(i)) ++buckets_[parameters_[i].bucket].missing;
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
          parameter.averaged,
          parameter.reduced_at,
          writes};
}

void GradientHooks::restore_one(HookedParameter& parameter, const Before& before) {
  const at::NoGradGuard no_grad;
  parameter.unreduced = before.unreduced;
  parameter.averaged = before.averaged;
  parameter.reduced_at = before.reduced_at;
  at::Tensor& grad = parameter.variable.mutable_grad();
  grad = before.in_bucket ? parameter.bucket_view : before.grad;  // the bucket may have moved
  parameter.outside.reset();
  if (!grad.defined()) return;
  grad.copy_(before.value);
  parameter.note_version();
  if (before.writes) parameter.version = parameter.current_version() - *before.writes;
}

Bitmap GradientHooks::fill(const Bitmap& planned, const Bitmap& due, double scale) {
  Bitmap carried;
  {
    const std::scoped_lock lock(mutex_);
    plan_.filled.clear();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!planned.get(i)) continue;
      HookedParameter& parameter = parameters_[i];
      parameter.refresh();
      if (!due.get(i)) {
        parameter.rejoin();
        plan_.filled.emplace(i, before(parameter));
      }
      if (parameter.averaged.value().defined() || !due.get(i)) parameter.carry();
      if (parameter.averaged.is_apart()) carried.set(i);
    }
  }
  move_into_buckets(planned, scale);
  return carried;
}

void GradientHooks::restore(const Bitmap& nowhere) {
  const std::scoped_lock lock(mutex_);
  for (const auto& [index, before] : plan_.filled) {
    if (nowhere.get(index)) restore_one(parameters_[index], before);
  }
  plan_.filled.clear();
}

void GradientHooks::take_up_late() {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(mutex_);
  for (auto& [index, kept] : std::exchange(pass_.late, {})) {
    HookedParameter& parameter = parameters_[index];
    parameter.refresh();
    at::Tensor& grad = parameter.variable.mutable_grad();
    parameter.carry();
    if (!grad.defined()) {
      parameter.outside = grad = kept.to(parameter.variable.device());
      parameter.outside_stream.reset();
    } else {
      if (grad.is_sparse()) grad = grad.to_dense();
      grad.add_(kept.to(grad.device()));
    }
    parameter.unreduced = true;
    parameter.passes = std::max(parameter.passes, step_.passes);
  }
}

}  // namespace torch_ring
