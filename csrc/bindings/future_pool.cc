#include "bindings/future_pool.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "bindings/blocking_call.h"
#include "core/clock.h"

namespace torch_ring {

namespace {

// A callback that lasts longer may be waiting for the thread that stops the pool.
constexpr std::chrono::seconds kStopPatience{1};

// Callbacks that last longer may be waiting for a later operation of the group. Longer, where some
// do: they may as well be waiting for Python's lock, of which there is one.
constexpr std::chrono::milliseconds kCallbackPatience{10};
constexpr std::chrono::milliseconds kLongestPatience{100};

thread_local const void* completes_for = nullptr;  // the pool whose callbacks this thread runs

}  // namespace

struct FuturePool::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Completion> added;
  int idle = 0;               // threads that wait for the role
  int watching = 0;           // of these, until a callback has lasted too long
  int threads = 0;            // that have not ended
  int completing = 0;         // threads that run callbacks
  Clock::time_point since{};  // when the last of these has begun
  bool is_awaiting = false;   // a thread has the role: it waits for the operations
  bool is_urgent = false;     // a callback has added a future, for which it may wait
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

/// Lets a thread look at what has been added. Precondition: the lock is held.
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
        // No thread can be had: this one goes on after the callbacks.
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

}  // namespace torch_ring
