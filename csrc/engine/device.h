// Device: an accelerator as the engine uses it. DeviceExecutor makes one and lets one thread at a
// time use it: for jobs, launches, polls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "collective/communicator.h"
#include "core/abort.h"
#include "engine/buffers.h"
#include "engine/device_gate.h"
#include "engine/executor.h"

namespace torch_ring {

/// A stream of an accelerator, the memory there, and a communicator whose work runs on the stream.
/// Thread: one at a time, but for abort(). Blocking: use() while NCCL takes a call, abort() for
/// some seconds. Errors: of kind kPeerLost, kTimeout, kInternal.
class Device {
 public:
  virtual ~Device() = default;

  virtual Communicator& communicator() = 0;
  virtual Buffers& buffers() = 0;

  /// Calls `enqueue` while this device and its stream are the calling thread's current ones.
  virtual void use(const std::function<void()>& enqueue) = 0;

  /// Whether enqueued work has not run yet. Throws the error of work that has failed.
  virtual bool busy() = 0;

  /// Ends enqueued work that waits for other ranks. Nothing can be enqueued afterwards. If a thread
  /// hangs in use(), another one may call this: the hanging call may wait for such work.
  virtual void abort() noexcept = 0;
};

/// What a launch enqueues (Engine::launch), on the device's stream.
using Enqueue = std::function<void(Communicator&, Buffers&)>;

/// Runs jobs on a device, and launches. It makes the device when the first job comes, so a rank
/// without tensors on a device needs neither NCCL nor the vendor's software.
///
/// The progress thread runs jobs and polls, any thread launches: a gate lets one at a time in. No
/// thread that waits for the gate may hold what the freeing of tensors needs (Python's GIL).
///
/// Thread: the progress thread, but for enter(), exists() and use(). Errors: the executor's and the
/// device's.
class DeviceExecutor {
 public:
  /// Makes a device. Collective over `host`'s ranks. `type`: Fingerprint::device.
  /// Errors: of kind kInvalidArgument, the same on all ranks, if they cannot use the device
  /// together; else as Device's.
  using Make = std::function<std::unique_ptr<Device>(std::uint8_t type, Communicator& host,
                                                     const Abort& abort)>;

  /// `timeout`: that of a wait for another thread's use of the device, too.
  DeviceExecutor(Make make, std::size_t fusion_threshold_bytes, const Abort& abort,
                 std::chrono::milliseconds timeout)
      : make_(std::move(make)),
        fusion_threshold_bytes_(fusion_threshold_bytes),
        abort_(abort),
        timeout_(timeout) {}

  /// Makes the device, if there is none yet. Collective. Returns the reason if the ranks cannot use
  /// one together; no later call makes one then.
  const std::optional<Error>& prepare(std::uint8_t type, Communicator& host, const Abort& abort) {
    if (device_ || unusable_) return unusable_;
    try {
      if (!make_) throw Error(ErrorKind::kInvalidArgument, "this engine has no devices");
      std::unique_ptr<Device> device = make_(type, host, abort);
      const DeviceGate::Pass pass = enter_or_throw();
      device_ = std::move(device);
      executor_.emplace(device_->communicator(), device_->buffers(), fusion_threshold_bytes_);
    } catch (const Error& error) {
      if (error.fatal()) throw;
      unusable_ = error;
    }
    return unusable_;
  }

  /// Lets the calling thread use the device until it drops the pass. Null when the job has ended,
  /// or when another thread has not left within the timeout. Thread: any. Blocking.
  DeviceGate::Pass enter() { return gate_.enter(timeout_, abort_); }

  /// The same, or throws the abort's cause, or Error(kTimeout).
  DeviceGate::Pass enter_or_throw() {
    DeviceGate::Pass pass = enter();
    if (pass) return pass;
    abort_.check();
    throw stuck();
  }

  /// Whether prepare() has made the device, and reset() has not freed it. Thread: the progress
  /// thread, or one with a pass.
  bool exists() const { return device_ != nullptr; }

  /// Calls `enqueue` on the device. Precondition: exists(), and the thread has a pass.
  void use(const Enqueue& enqueue) {
    device_->use([&] { enqueue(device_->communicator(), device_->buffers()); });
  }

  /// Precondition: exists(), and the thread has a pass.
  Buffers& buffers() { return device_->buffers(); }

  /// Enqueues the jobs, as Executor::run() does. Precondition: prepare() has made the device.
  template <class Done>
  void run(std::span<const Job> jobs, Done&& done) {
    const DeviceGate::Pass pass = enter_or_throw();
    device_->use([&] { executor_->run(jobs, done); });
  }

  /// Tells `report` whether enqueued work has not run yet, while no thread can enqueue more. Tells
  /// nothing if a thread is about to. Errors: the device's; Error(kTimeout) if that thread hangs.
  template <class Report>
  void poll(Report&& report) {
    if (!device_) return;
    if (const DeviceGate::Pass pass = gate_.try_enter()) {
      report(device_->busy());
    } else if (gate_.held_for() > timeout_ + kParting) {
      throw stuck();
    }
  }

  /// Ends enqueued work that waits for other ranks. Nothing can be enqueued afterwards.
  /// Precondition: the abort is raised.
  void abort() noexcept {
    // A thread inside sees the abort and leaves, unless it hangs: then the device's end frees it.
    const DeviceGate::Pass pass = gate_.enter(std::min<Clock::duration>(timeout_, kParting));
    if (device_) device_->abort();
  }

  /// Frees the device. If a thread hangs there, the destructor does it, after that thread has left.
  void reset() {
    const DeviceGate::Pass pass = gate_.enter(std::min<Clock::duration>(timeout_, kParting));
    if (!pass) return;
    executor_.reset();
    device_.reset();
  }

 private:
  // How long a thread may need to leave the device after it could see that it should.
  static constexpr std::chrono::milliseconds kParting{2000};

  Error stuck() const {
    return {ErrorKind::kTimeout,
            "a thread's call of the device has not returned within " + in_seconds(timeout_)};
  }

  const Make make_;
  const std::size_t fusion_threshold_bytes_;
  const Abort& abort_;
  const std::chrono::milliseconds timeout_;
  DeviceGate gate_;  // for all use of what follows; only the progress thread makes or frees it
  std::unique_ptr<Device> device_;
  std::optional<Executor> executor_;
  std::optional<Error> unusable_;
};

}  // namespace torch_ring
