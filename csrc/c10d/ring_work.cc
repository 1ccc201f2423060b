// SPDX-License-Identifier: Apache-2.0
#include "c10d/ring_work.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "bindings/accelerator.h"
#include "bindings/blocking_call.h"
#include "bindings/errors.h"
#include "bindings/py_engine.h"
#include "c10d/c10d_requests.h"
#include "core/clock.h"

namespace torch_ring {

namespace {

// A callback that lasts longer may be waiting for the thread that stops the pool.
constexpr std::chrono::seconds kStopPatience{1};

// Callbacks that last longer may be waiting for a later operation of the group. The patience grows
// with the number of running callbacks, which may as well be waiting for the GIL.
constexpr std::chrono::milliseconds kCallbackPatience{10};
constexpr std::chrono::milliseconds kLongestPatience{100};

thread_local const void* completes_for = nullptr;  // the pool whose callbacks this thread runs

}  // namespace

struct FuturePool::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Completion> added;
  int idle = 0;               // threads that wait for the role
  int watching = 0;           // of these: waiting until a callback has lasted too long
  int threads = 0;            // that have not ended
  int completing = 0;         // threads that run callbacks
  Clock::time_point since{};  // when the last of these began
  bool is_awaiting = false;   // a thread has the role: it waits for the operations
  bool is_urgent = false;     // a callback has added a future, and may wait for it
  bool stopping = false;

  bool role_is_free() const {
    return !is_awaiting && !added.empty() &&
           (completing == 0 || is_urgent || Clock::now() >= too_long());
  }

  Clock::time_point too_long() const {
    return since + std::min(kCallbackPatience * completing, kLongestPatience);
  }

  bool is_over() const { return stopping && added.empty(); }
};

FuturePool::FuturePool() : state_(std::make_shared<State>()) {}

void FuturePool::add(Completion completion) {
  const std::scoped_lock lock(state_->mutex);
  state_->added.push_back(std::move(completion));
  if (state_->is_awaiting) return;
  if (completes_for == state_.get()) state_->is_urgent = true;
  call_a_thread(state_);
}

/// Lets a thread handle the added futures. Precondition: the lock is held.
void FuturePool::call_a_thread(const std::shared_ptr<State>& state) {
  if (state->idle == 0) {
    std::thread([state] { run(state); }).detach();
    ++state->threads;
    ++state->idle;  // it is about to be
  } else if (state->watching == 0 || state->role_is_free()) {
    state->changed.notify_one();
  }
}

void FuturePool::run(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  completes_for = state.get();
  for (;;) {  // here the thread is idle
    while (!state->role_is_free() && !state->is_over()) {
      if (state->is_awaiting || state->added.empty()) {
        state->changed.wait(lock);
      } else {
        ++state->watching;
        state->changed.wait_until(lock, state->too_long());
        --state->watching;
      }
    }
    --state->idle;
    if (state->added.empty()) break;
    Completion completion = std::move(state->added.front());
    state->added.pop_front();
    state->is_awaiting = true;
    state->is_urgent = false;
    lock.unlock();
    completion.await();
    lock.lock();
    state->is_awaiting = false;
    ++state->completing;
    state->since = Clock::now();
    if (!state->added.empty()) {
      try {
        call_a_thread(state);
      } catch (const std::system_error&) {
        // No thread can be started: this one continues after the callbacks.
      }
    }
    lock.unlock();
    {
      const CountedCall counted;  // Python callbacks: the interpreter waits for them
      completion.complete();
      completion = {};
    }
    lock.lock();
    --state->completing;
    ++state->idle;
  }
  --state->threads;
  state->changed.notify_all();
}

void FuturePool::stop() {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kStopPatience, [&] { return state_->threads == 0; });
}

void FuturePool::abandon() {
  if (state_) new std::shared_ptr<State>(std::move(state_));
}

namespace {

using std::chrono::steady_clock;

/// The exception of an interrupt when the operation's deadline has passed.
struct DeadlinePassed {};

[[noreturn]] void fail_wait(const std::string& operation) {
  throw Error(ErrorKind::kTimeout,
              operation +
                  ": not done within the timeout of this wait(): a rank has not called it, or is "
                  "slow. It goes on: wait for it again");
}

std::vector<c10::Device> devices_of(const Tensors& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu() && devices.empty()) devices.push_back(tensor.device());
  }
  return devices;
}

}  // namespace

Engine::Interrupt interrupt_at(OperationDeadline deadline) {
  const bool is_pythons = PyGILState_GetThisThreadState() != nullptr;
  return [deadline, is_pythons] {
    if (deadline && steady_clock::now() >= *deadline) throw DeadlinePassed{};
    if (is_pythons) check_signals();
  };
}

PendingCollective::PendingCollective(std::shared_ptr<Engine> engine, C10dOperation operation,
                                     const Tensors& inputs, Engine::Mode mode)
    : engine_(std::move(engine)),
      outputs_(std::move(operation.outputs)),
      late_error_(std::move(operation.late_error)) {
  const Tensors& placed = outputs_.empty() ? inputs : outputs_;  // only a root has some outputs
  const std::vector<c10::Device> devices = devices_of(placed);
  for (const at::Tensor& tensor : placed) DeviceChoice::of_process()->use(tensor.device());
  std::shared_ptr<c10::Event> ready;  // of all
  for (Request& request : operation.requests) {
    if (devices.empty() || request.fingerprint.on_host()) continue;
    if (!ready) ready = recorded_now(devices.front());
    events_.emplace_back(devices.front(), ready).follow(request);
  }
  works_ = engine_->submit(std::move(operation.requests), mode);
}

bool PendingCollective::done() const {
  for (const auto& work : works_) {
    if (!work->done()) return false;
  }
  return true;
}

void PendingCollective::wait(OperationDeadline deadline) const {
  const CountedCall counted;
  const Engine::Interrupt interrupt = interrupt_at(deadline);
  for (const auto& work : works_) {
    try {
      engine_->wait(*work, interrupt);
    } catch (const DeadlinePassed&) {
      fail_wait(work->request().fingerprint.describe());
    }
  }
  if (late_error_) late_error_->check();
}

void PendingCollective::synchronize() const {
  if (events_.empty()) return;
  engine_->check();
  const OutputEvent* waited = nullptr;
  for (const OutputEvent& event : events_) {
    if (outputs_.empty()) event.wait({}, waited);  // the input may be written now
    for (const at::Tensor& output : outputs_) {
      event.wait(output, waited);
      waited = &event;
    }
  }
}

int PendingOperation::source() const {
  throw Error(ErrorKind::kInvalidArgument, "only a receive has a source rank");
}

void PendingMessage::wait(OperationDeadline deadline) const {
  const CountedCall counted;
  const bool is_groups = !deadline && timeout_.count() > 0;
  if (is_groups) deadline = steady_clock::now() + timeout_;
  try {
    request_->wait(interrupt_at(deadline));
  } catch (const DeadlinePassed&) {
    if (!is_groups) fail_wait(request_->describe());
    const MessageSpec& spec = request_->spec();
    engine_->end(Error(ErrorKind::kTimeout,
                       request_->describe() + (spec.is_send ? " to " : " from ") +
                           (spec.peer ? "rank " + std::to_string(*spec.peer) : "any rank") +
                           " was waited for during " + in_seconds(timeout_) +
                           " (the timeout of its group): the other rank is late"));
  }
}

void DeferredOperation::begin() {
  std::shared_ptr<PendingOperation> begun;
  try {
    begun = std::exchange(begin_, nullptr)();
  } catch (const Error& error) {
    return fail(error);
  } catch (const std::exception& error) {
    return fail(Error(ErrorKind::kInternal, error.what()));
  }
  const std::scoped_lock lock(mutex_);
  begun_ = std::move(begun);
  changed_.notify_all();
}

void DeferredOperation::fail(const Error& error) {
  const std::scoped_lock lock(mutex_);
  error_ = error;
  changed_.notify_all();
}

bool DeferredOperation::done() const {
  const std::scoped_lock lock(mutex_);
  return error_ || (begun_ && begun_->done());
}

void DeferredOperation::wait(OperationDeadline deadline) const {
  const CountedCall counted;
  const Engine::Interrupt interrupt = interrupt_at(deadline);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kInterrupts, [&] { return begun_ || error_; })) {
    lock.unlock();
    try {
      interrupt();
    } catch (const DeadlinePassed&) {
      fail_wait("an operation of a group that is being connected");
    }
    lock.lock();
  }
  if (error_) throw Error(*error_);
  const std::shared_ptr<PendingOperation> begun = begun_;
  lock.unlock();
  begun->wait(deadline);
}

int DeferredOperation::source() const {
  const std::scoped_lock lock(mutex_);
  return begun_ ? begun_->source() : PendingOperation::source();
}

RingWork::RingWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs,
                   std::shared_ptr<PendingOperation> operation, std::shared_ptr<FuturePool> pool,
                   std::uint64_t sequence)
    : c10d::Work(rank, type, title, inputs),
      operation_(std::move(operation)),
      pool_(std::move(pool)),
      sequence_(sequence) {}

bool RingWork::isCompleted() {
  if (!operation_->done()) return false;
  await();
  return true;
}

bool RingWork::isSuccess() const { return operation_->done() && !exception(); }

std::exception_ptr RingWork::exception() const {
  // A done work has its error, of which the base class is told only on demand.
  if (operation_->done()) const_cast<RingWork*>(this)->await();
  return c10d::Work::exception();
}

bool RingWork::wait(std::chrono::milliseconds timeout) {
  refuse_in_child_of(home_);
  OperationDeadline deadline;
  if (timeout > kNoTimeout) deadline = steady_clock::now() + timeout;
  try {
    operation_->wait(deadline);
  } catch (...) {
    if (operation_->done()) finish_once(std::current_exception());  // otherwise a signal handler's
    throw;
  }
  finish_once(nullptr);
  synchronize();
  return true;
}

void RingWork::synchronize() { operation_->synchronize(); }

int RingWork::sourceRank() const { return operation_->source(); }

std::vector<at::Tensor> RingWork::result() { return operation_->outputs(); }

/// Tells the base class, and so the profiler, that the operation is over.
void RingWork::finish_once(std::exception_ptr error) {
  {
    const std::scoped_lock lock(future_mutex_);
    if (std::exchange(finished_, true)) return;
  }
  finish(std::move(error));
}

void RingWork::await() {
  try {
    operation_->wait(std::nullopt);
  } catch (...) {
    finish_once(std::current_exception());
    return;
  }
  finish_once(nullptr);
}

c10::intrusive_ptr<c10::ivalue::Future> RingWork::getFuture() {
  refuse_in_child_of(home_);
  const std::scoped_lock lock(future_mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     devices_of(operation_->outputs()));
  const auto self = c10::intrusive_ptr<RingWork>::reclaim_copy(this);
  pool_->add({[self] { self->await(); }, [self] { self->complete_future(); }});
  return future_;
}

/// Called by the pool, after await(): the future's callbacks may wait for other operations.
void RingWork::complete_future() {
  if (const std::exception_ptr error = exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& known) {
      future_->setError(through_torch(known));
    } catch (...) {
      future_->setError(error);
    }
    return;
  }
  try {
    operation_->synchronize();  // the callbacks' streams wait for this thread's
    future_->markCompleted(c10::IValue(operation_->outputs()));
  } catch (...) {
    future_->setErrorIfNeeded(std::current_exception());
  }
}

}  // namespace torch_ring
