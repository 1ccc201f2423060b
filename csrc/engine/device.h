// Device: an accelerator as the engine uses it. DeviceExecutor makes one and runs jobs on it.
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
#include "engine/executor.h"

namespace torch_ring {

/// A stream of an accelerator, the memory there, and a communicator whose work runs on the stream.
/// Thread: the progress thread. Blocking: no. Errors: of kind kPeerLost, kTimeout, kInternal.
class Device {
 public:
  virtual ~Device() = default;

  virtual Communicator& communicator() = 0;
  virtual Buffers& buffers() = 0;

  /// Calls `enqueue` while this device and its stream are the calling thread's current ones.
  virtual void use(const std::function<void()>& enqueue) = 0;

  /// Whether enqueued work has not run yet. Throws the error of work that has failed.
  virtual bool busy() = 0;

  /// Ends enqueued work that waits for other ranks. Nothing can be enqueued afterwards.
  virtual void abort() noexcept = 0;
};

/// Runs jobs on a device. It makes the device when the first job comes, so a rank without tensors
/// on a device needs neither NCCL nor the vendor's software.
/// Thread: the progress thread. Errors: the executor's and the device's.
class DeviceExecutor {
 public:
  /// Makes a device. Collective over `host`'s ranks. `type`: Fingerprint::device.
  /// Errors: of kind kInvalidArgument, the same on all ranks, if they cannot use the device
  /// together; else as Device's.
  using Make = std::function<std::unique_ptr<Device>(std::uint8_t type, Communicator& host,
                                                     const Abort& abort)>;

  DeviceExecutor(Make make, std::size_t fusion_threshold_bytes)
      : make_(std::move(make)), fusion_threshold_bytes_(fusion_threshold_bytes) {}

  /// Makes the device, if there is none yet. Collective. Returns the reason if the ranks cannot use
  /// one together; no later call makes one then.
  const std::optional<Error>& prepare(std::uint8_t type, Communicator& host, const Abort& abort) {
    if (device_ || unusable_) return unusable_;
    try {
      if (!make_) throw Error(ErrorKind::kInvalidArgument, "this engine has no devices");
      device_ = make_(type, host, abort);
      executor_.emplace(device_->communicator(), device_->buffers(), fusion_threshold_bytes_);
    } catch (const Error& error) {
      if (error.fatal()) throw;
      unusable_ = error;
    }
    return unusable_;
  }

  /// Precondition: prepare() has made the device.
  Buffers& buffers() { return device_->buffers(); }

  /// Enqueues the jobs, as Executor::run() does. Precondition: prepare() has made the device.
  template <class Done>
  void run(std::span<const Job> jobs, Done&& done) {
    device_->use([&] { executor_->run(jobs, done); });
  }

  bool exists() const { return device_ != nullptr; }
  bool busy() { return device_ && device_->busy(); }
  void abort() noexcept {
    if (device_) device_->abort();
  }
  void reset() {
    executor_.reset();
    device_.reset();
  }

 private:
  const Make make_;
  const std::size_t fusion_threshold_bytes_;
  std::unique_ptr<Device> device_;
  std::optional<Executor> executor_;
  std::optional<Error> unusable_;
};

}  // namespace torch_ring
