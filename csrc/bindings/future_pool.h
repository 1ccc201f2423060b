// FuturePool: threads that wait for operations and complete their futures.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace torch_ring {

/// An operation with a future.
struct Completion {
  std::function<void()> await;     // blocks until the operation is done or has failed; throws not
  std::function<void()> complete;  // completes the future: runs its callbacks, which may block
};

/// Completes the futures of one group, in the order in which they were added. One thread at a time
/// waits for operations, and makes progress on them. While it completes a future, another thread
/// takes that role if a callback asks for a future itself, or lasts for long: it may wait for a
/// later operation of the group, as PowerSGD's does. So there are as many threads as callbacks that
/// wait, and one or two more. A pool without futures has no threads.
///
/// Thread: any. Blocking: stop() only.
class FuturePool {
 public:
  FuturePool();
  ~FuturePool() { stop(); }
  FuturePool(const FuturePool&) = delete;
  FuturePool& operator=(const FuturePool&) = delete;

  /// Errors: std::system_error if there is no thread and none can be started.
  void add(Completion completion);

  /// Waits, without the GIL, until the threads have completed all futures, for a second at most: a
  /// callback may be waiting for the caller. Call it when the operations have failed or are done.
  void stop();

  /// In a forked child, which lacks the threads: leaks what they hold.
  void abandon();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  static void call_a_thread(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // the threads, which are detached, share it
};

}  // namespace torch_ring
