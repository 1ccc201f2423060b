// DeviceGate: one thread at a time uses a device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "core/abort.h"
#include "core/clock.h"

namespace torch_ring {

/// A mutex for a device, whose calls may take long: a wait for it has a deadline, and ends when the
/// job does. A thread that has passed may lock the engine's mutex (request_queue.h), not the other
/// way round.
/// Thread: any. Errors: none.
class DeviceGate {
  struct Leave {
    void operator()(DeviceGate* gate) const { gate->leave(); }
  };

 public:
  /// The right to use the device, as long as it lives. Null: another thread has it.
  using Pass = std::unique_ptr<DeviceGate, Leave>;

  Pass try_enter();

  /// Blocking: until no other thread has the pass, for `patience` at most.
  Pass enter(Clock::duration patience);

  /// The same, but no longer than until `abort` is raised.
  Pass enter(Clock::duration patience, const Abort& abort);

  /// How long the thread that has the pass has had it; 0 if none has it.
  Clock::duration held_for();

 private:
  Pass take();
  void leave();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool taken_ = false;
  Clock::time_point since_;  // of the last pass
};

}  // namespace torch_ring
