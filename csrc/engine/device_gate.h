// DeviceGate: one thread at a time uses a device.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "core/abort.h"
#include "core/clock.h"

namespace torch_ring {

/// A mutex for a device, whose calls may take long: a wait for it has a deadline, and ends when the
/// job does. Whoever has passed may lock the engine's mutex (request_queue.h), not the other way
/// round.
/// Thread: any. Errors: none.
class DeviceGate {
  struct Leave {
    void operator()(DeviceGate* gate) const { gate->leave(); }
  };

 public:
  /// The right to use the device, as long as it lives. Null: the gate was closed.
  using Pass = std::unique_ptr<DeviceGate, Leave>;

  Pass try_enter() {
    const std::scoped_lock lock(mutex_);
    return take();
  }

  /// Blocking: until the gate is open, for `patience` at most.
  Pass enter(Clock::duration patience) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience, [&] { return !taken_; });
    return take();
  }

  /// The same, but not after `abort` is raised.
  Pass enter(Clock::duration patience, const Abort& abort) {
    const auto deadline = Clock::now() + patience;
    std::unique_lock lock(mutex_);
    while (taken_ && !abort.raised() && Clock::now() < deadline) {
      changed_.wait_until(lock, std::min(deadline, Clock::now() + kLook));
    }
    return take();
  }

  /// How long the thread that has passed has been inside; 0 if there is none.
  Clock::duration held_for() {
    const std::scoped_lock lock(mutex_);
    return taken_ ? Clock::now() - since_ : Clock::duration{0};
  }

 private:
  static constexpr std::chrono::milliseconds kLook{50};  // between looks at the abort

  Pass take() {
    if (taken_) return nullptr;
    taken_ = true;
    since_ = Clock::now();
    return Pass(this);
  }

  void leave() {
    const std::scoped_lock lock(mutex_);
    taken_ = false;
    changed_.notify_one();
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool taken_ = false;
  Clock::time_point since_;  // of the last pass
};

}  // namespace torch_ring
