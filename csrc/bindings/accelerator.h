// DeviceChoice and make_accelerator(): one of torch's accelerators, with NCCL on it.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/config.h"
#include "engine/device.h"

namespace torch_ring {

/// The device of this process's tensors: that of the first tensor. Thread: any.
class DeviceChoice {
 public:
  /// The one choice that all live engines share.
  static std::shared_ptr<DeviceChoice> of_process();

  /// Chooses `device`, or checks that it is the chosen one. Does nothing for the CPU. Errors:
  /// Error(kInvalidArgument) if another device is chosen, or if the thread's stream is being
  /// captured into a CUDA graph.
  void use(c10::Device device);

  /// The chosen device, if there is one.
  std::optional<c10::Device> chosen();

  /// Prefers the thread's current device, for a rank that has no tensor on a device yet.
  void prefer_current();

  /// The chosen device. If there is none, chooses the preferred one, or else the current one of
  /// that type. Errors: c10::Error if there is none.
  c10::Device get(c10::DeviceType type);

 private:
  std::mutex mutex_;
  std::optional<c10::Device> device_;
  std::optional<c10::Device> preferred_;
};

/// NCCL's settings in the environment.
struct NcclSettings {
  std::string library;    // its path, or empty
  bool blocking = false;  // NCCL_COMM_BLOCKING is set, which cannot be used here
};

/// How long the ranks' devices wait for one another, and who hears of it.
struct DevicePatience {
  EngineConfig config;
  std::function<void(const std::string&)> log;  // takes a warning
};

/// Makes a device for DeviceExecutor::Make. What the stream runs waits for late ranks as
/// `patience` says, and calls of NCCL for its transfer_timeout(). `labels`: by rank.
std::unique_ptr<Device> make_accelerator(DeviceChoice& choice, c10::DeviceType type,
                                         Communicator& host, const Abort& abort,
                                         const DevicePatience& patience,
                                         const std::vector<std::string>& labels,
                                         const NcclSettings& settings);

}  // namespace torch_ring
