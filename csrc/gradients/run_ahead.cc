#include "gradients/run_ahead.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "bindings/accelerator.h"
#include "bindings/requests.h"

namespace torch_ring {

Launched Launcher::allreduce(const at::Tensor& tensor, int op, double prescale, double postscale,
                             const Engine::Interrupt& interrupt) const {
  std::shared_ptr<Engine> engine = engine_.lock();
  if (!engine) throw Error(ErrorKind::kInternal, "torch_ring was shut down");
  Request request = allreduce_request(tensor, tensor, "launched", op, prescale, postscale, size_);
  if (request.fingerprint.on_host()) {
    throw Error(ErrorKind::kInvalidArgument,
                request.fingerprint.describe() + ": only reductions on a device are launched");
  }
  OutputEvent written(tensor.device());
  written.follow(request);
  engine->launch(
      request.fingerprint,
      [&](Communicator& communicator, Buffers&) {
        request.begin();
        communicator.allreduce(request.input, request.output, request.fingerprint.count(),
                               reduction_of(request.fingerprint, communicator));
        request.finish();
      },
      interrupt);
  return {std::move(engine), tensor, std::move(written)};
}

namespace {

/// Elements [begin, end) of a flat tensor.
at::Tensor part_of(const at::Tensor& flat, const std::pair<std::int64_t, std::int64_t>& run) {
  const bool is_whole = run.first == 0 && run.second == flat.numel();
  return is_whole ? flat : flat.narrow(0, run.first, run.second - run.first);
}

at::Tensor zeros_for(const PlannedBucket& planned) {
  return at::zeros({planned.memory.numel()}, planned.memory.options());
}

}  // namespace

void RunAhead::set_plan(std::vector<PlannedBucket> buckets) {
  const std::scoped_lock lock(mutex_);
  states_.clear();  // they point into the old plan
  plan_ = std::move(buckets);
}

void RunAhead::open() {
  const std::scoped_lock lock(mutex_);
  states_.clear();
  next_ = 0;
  error_ = nullptr;
  for (const PlannedBucket& planned : plan_) {
    states_.push_back({&planned, false, std::nullopt, {}});
  }
}

void RunAhead::bucket_full(const GradientHooks& optimizer, std::size_t bucket) {
  const std::scoped_lock lock(mutex_);
  State* const state = find(optimizer, bucket);
  if (state == nullptr) return;
  state->full = true;
  if (state == &states_[next_]) {
    launch_full();
  } else {  // another thread may launch it, on another stream
    const c10::Stream stream = current_stream(state->planned->memory.device());
    state->ready.emplace(stream.device_type()).record(stream);
  }
}

void RunAhead::wait_for(const GradientHooks& optimizer, std::size_t bucket) {
  const std::scoped_lock lock(mutex_);
  const State* const state = find(optimizer, bucket);
  if (state == nullptr) return;
  for (const Launched& launched : state->launched) launched.wait();
}

bool RunAhead::has_launched() {
  const std::scoped_lock lock(mutex_);
  return next_ > 0 || error_;
}

void RunAhead::launch_rest() {
  const std::scoped_lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  for (; next_ < states_.size(); ++next_) launch(states_[next_]);
}

void RunAhead::wait() {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard no_grad;
  for (State& state : states_) {
    const PlannedBucket& planned = *state.planned;
    for (const Launched& launched : state.launched) launched.wait();
    const auto optimizer = planned.optimizer.lock();
    if (!optimizer || !planned.cast) continue;
    const at::Tensor memory = optimizer->memory(planned.bucket);
    for (const auto& run : planned.runs) part_of(memory, run).copy_(part_of(planned.memory, run));
  }
  states_.clear();
  next_ = 0;
}

void RunAhead::stand_in() {
  const std::scoped_lock lock(mutex_);
  for (const PlannedBucket& planned : plan_) {
    const at::Tensor zeros = zeros_for(planned);
    for (const auto& run : planned.runs) {
      launcher_.allreduce(part_of(zeros, run), planned.op, planned.prescale, planned.postscale);
    }
  }
}

void RunAhead::add(std::int64_t optimizer, std::weak_ptr<GradientHooks> memory) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(optimizers_, [](const auto& each) { return each.second.expired(); });
  optimizers_.insert_or_assign(optimizer, std::move(memory));
}

const void* RunAhead::kept(std::int64_t optimizer, std::int64_t number, std::size_t index,
                           std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  const auto found = optimizers_.find(optimizer);
  const auto memory = found == optimizers_.end() ? nullptr : found->second.lock();
  return memory ? memory->kept(number, index, bytes) : nullptr;
}

RunAhead::State* RunAhead::find(const GradientHooks& optimizer, std::size_t bucket) {
  for (State& state : states_) {
    const bool is_it =
        state.planned->bucket == bucket && state.planned->optimizer.lock().get() == &optimizer;
    if (is_it) return &state;
  }
  return nullptr;
}

/// Launches the buckets that are full, up to the first one that is not.
void RunAhead::launch_full() {
  try {
    for (; !error_ && next_ < states_.size() && states_[next_].full; ++next_) {
      launch(states_[next_]);
    }
  } catch (...) {  // torch would convert it to a RuntimeError
    error_ = std::current_exception();
  }
}

void RunAhead::launch(State& state) {
  const at::NoGradGuard no_grad;
  const PlannedBucket& planned = *state.planned;
  if (state.ready) state.ready->block(current_stream(planned.memory.device()));
  const auto optimizer = planned.optimizer.lock();
  at::Tensor memory;
  if (!optimizer) {
    memory = zeros_for(planned);  // its optimizer is gone
  } else if (planned.cast) {
    const at::Tensor bucket = optimizer->memory(planned.bucket);
    for (const auto& run : planned.runs) part_of(planned.memory, run).copy_(part_of(bucket, run));
    memory = planned.memory;
  } else {
    memory = optimizer->memory(planned.bucket);
  }
  for (const auto& run : planned.runs) {
    state.launched.push_back(
        launcher_.allreduce(part_of(memory, run), planned.op, planned.prescale, planned.postscale));
  }
}

std::function<void*(std::span<const std::int64_t>)> standing_in(
    std::shared_ptr<RunAhead> run_ahead) {
  return [run_ahead = std::move(run_ahead)](std::span<const std::int64_t> asked) -> void* {
    if (!run_ahead) return nullptr;
    if (asked.size() > 1) {
      return const_cast<void*>(run_ahead->kept(asked[0], asked[1],
                                               static_cast<std::size_t>(asked[2]),
                                               static_cast<std::size_t>(asked[3])));
    }
    torch_call([&] { run_ahead->stand_in(); });
    return nullptr;
  };
}

}  // namespace torch_ring
