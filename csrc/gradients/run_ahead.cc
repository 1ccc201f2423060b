// SPDX-License-Identifier: Apache-2.0
#include "gradients/run_ahead.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "bindings/accelerator.h"
#include "bindings/requests.h"

namespace torch_ring {

namespace {

constexpr const char* kLaunched = "launched";  // the name of each

}  // namespace

Launched launch_allreduce(std::shared_ptr<Engine> engine, int size, const at::Tensor& tensor,
                          int op, double prescale, double postscale,
                          const Engine::Interrupt& interrupt) {
  Request request = allreduce_request(tensor, tensor, kLaunched, op, prescale, postscale, size);
  if (request.fingerprint.on_host()) {
    throw Error(ErrorKind::kInvalidArgument,
                request.fingerprint.describe() + ": only reductions on a device are launched");
  }
  OutputEvent written(tensor.device(), recorded_now(tensor.device()));
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

Launched launch_plain(const std::weak_ptr<Engine>& engine, const Fingerprint& what,
                      const at::Tensor& input, const at::Tensor& output,
                      std::shared_ptr<c10::Event> ready, bool promised) {
  std::shared_ptr<Engine> present = running(engine);
  OutputEvent written(output.device(), std::move(ready));
  const auto enqueue = [&](Communicator& communicator, Buffers&) {
    written.begin();
    keep_for_stream(output);
    void* const data = output.mutable_data_ptr();
    if (what.collective == Collective::kAllgather) {
      keep_for_stream(input);
      const std::vector<std::size_t> bytes(static_cast<std::size_t>(communicator.size()),
                                           input.nbytes());
      communicator.allgather(input.const_data_ptr(), data, bytes);
    } else {
      communicator.allreduce(data, data, what.count(), reduction_of(what, communicator));
    }
    written.finish();
  };
  present->launch(what, std::cref(enqueue), {}, promised);
  return {std::move(present), output, std::move(written)};
}

std::shared_ptr<Engine> running(const std::weak_ptr<Engine>& engine) {
  std::shared_ptr<Engine> present = engine.lock();
  if (!present) throw Error(ErrorKind::kInternal, "torch_ring was shut down");
  return present;
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
  close();
  plan_.clear();
  for (PlannedBucket& planned : buckets) {
    Fingerprint what = fingerprint_of({.collective = Collective::kAllreduce,
                                       .op = static_cast<ReduceOp>(planned.op),
                                       .prescale = planned.prescale,
                                       .postscale = planned.postscale,
                                       .name = kLaunched},
                                      planned.memory);
    State& state = plan_.emplace_back();
    for (const auto& [begin, end] : planned.runs) {
      what.shape = {end - begin};
      state.runs.push_back(what);
    }
    state.planned = std::move(planned);
  }
}

void RunAhead::open() {
  const std::scoped_lock lock(mutex_);
  close();
  error_ = nullptr;
  is_open_ = true;
}

void RunAhead::bucket_full(const GradientHooks& optimizer, std::size_t bucket) {
  const std::scoped_lock lock(mutex_);
  State* const state = find(optimizer, bucket);
  if (state == nullptr || error_) return;
  try {
    prepare(*state);
    for (; next_ < plan_.size() && plan_[next_].ready; ++next_) launch(plan_[next_]);
  } catch (...) {  // torch would convert it to a RuntimeError
    error_ = std::current_exception();
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
  for (; is_open_ && next_ < plan_.size(); ++next_) {
    if (!plan_[next_].ready) prepare(plan_[next_]);
    launch(plan_[next_]);
  }
}

void RunAhead::wait() {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard no_grad;
  const Launched* last = nullptr;  // with which the others have ended
  for (auto state = plan_.rbegin(); state != plan_.rend(); ++state) {
    for (auto run = state->launched.rbegin(); run != state->launched.rend(); ++run) {
      run->wait(last);
      if (last == nullptr) last = &*run;
    }
  }
  for (const State& state : plan_) {
    const PlannedBucket& planned = state.planned;
    const auto optimizer = planned.optimizer.lock();
    if (!optimizer || !planned.cast || state.launched.empty()) continue;
    const at::Tensor memory = optimizer->memory(planned.bucket);
    for (const auto& run : planned.runs) part_of(memory, run).copy_(part_of(planned.memory, run));
  }
  close();
}

void RunAhead::stand_in() {
  const std::scoped_lock lock(mutex_);
  for (const State& state : plan_) {
    const at::Tensor zeros = zeros_for(state.planned);
    const auto ready = recorded_now(zeros.device());
    for (std::size_t i = 0; i < state.runs.size(); ++i) {
      const at::Tensor run = part_of(zeros, state.planned.runs[i]);
      launch_plain(engine_, state.runs[i], run, run, ready);
    }
  }
}

RunAhead::State* RunAhead::find(const GradientHooks& optimizer, std::size_t bucket) {
  if (!is_open_) return nullptr;
  const auto found = std::ranges::find_if(plan_, [&](const State& state) {
    return state.planned.bucket == bucket && state.planned.optimizer.lock().get() == &optimizer;
  });
  return found == plan_.end() ? nullptr : &*found;
}

void RunAhead::close() {
  for (State& state : plan_) {
    state.memory.reset();
    state.ready.reset();
    state.launched.clear();
  }
  next_ = 0;
  is_open_ = false;
}

/// Makes a bucket ready to be launched after the work that is on the current stream now; another
/// thread may launch it.
void RunAhead::prepare(State& state) const {
  const at::NoGradGuard no_grad;
  const PlannedBucket& planned = state.planned;
  const auto optimizer = planned.optimizer.lock();
  state.memory = optimizer ? optimizer->memory(planned.bucket) : zeros_for(planned);  // it is gone
  if (optimizer && planned.cast) {
    for (const auto& run : planned.runs) {
      part_of(planned.memory, run).copy_(part_of(state.memory, run));
    }
    state.memory = planned.memory;
  }
  state.ready = recorded_now(planned.memory.device());
}

void RunAhead::launch(State& state) const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < state.runs.size(); ++i) {
    const at::Tensor run = part_of(state.memory, state.planned.runs[i]);
    state.launched.push_back(launch_plain(engine_, state.runs[i], run, run, state.ready));
  }
}

std::function<void*(std::span<const std::int64_t>)> standing_in(
    std::shared_ptr<RunAhead> run_ahead) {
  return [run_ahead = std::move(run_ahead)](std::span<const std::int64_t>) -> void* {
    torch_call([&] { run_ahead->stand_in(); });
    return nullptr;
  };
}

}  // namespace torch_ring
