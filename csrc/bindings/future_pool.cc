#include "bindings/future_pool.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "bindings/blocking_call.h"

namespace torch_ring {

namespace {

// A callback that lasts longer may be waiting for the thread that stops the pool.
constexpr std::chrono::seconds kStopPatience{1};

}  // namespace

struct FuturePool::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Completion> added;
  int idle = 0;              // threads that wait for the role
  int threads = 0;           // that have not ended
  bool is_awaiting = false;  // a thread has the role: it waits for the operations
  bool stopping = false;
};

FuturePool::FuturePool() : state_(std::make_shared<State>()) {}

void FuturePool::add(Completion completion) {
  const std::scoped_lock lock(state_->mutex);
  state_->added.push_back(std::move(completion));
  if (state_->is_awaiting) return;
  if (state_->idle == 0) {
    std::thread([state = state_] { run(state); }).detach();
    ++state_->threads;
    ++state_->idle;  // it is about to be
  }
  state_->changed.notify_one();
}

void FuturePool::run(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  for (;;) {  // here the thread is idle
    state->changed.wait(lock, [&] {
      return (state->stopping && state->added.empty()) ||
             (!state->is_awaiting && !state->added.empty());
    });
    --state->idle;
    if (state->added.empty()) break;
    Completion completion = std::move(state->added.front());
    state->added.pop_front();
    state->is_awaiting = true;
    lock.unlock();
    completion.await();
    lock.lock();
    state->is_awaiting = false;
    if (!state->added.empty()) {  // hand the role on before the callbacks run
      if (state->idle == 0) {
        try {
          std::thread([state] { run(state); }).detach();
          ++state->threads;
          ++state->idle;
        } catch (const std::system_error&) {
          // No thread can be had: this one goes on after the callbacks.
        }
      }
      state->changed.notify_one();
    }
    lock.unlock();
    {
      const CountedCall counted;  // Python callbacks: the interpreter waits for them
      completion.complete();
      completion = {};
    }
    lock.lock();
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
