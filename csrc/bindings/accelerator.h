// make_accelerator(): an accelerator of torch's, with NCCL on it.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/device.h"

namespace torch_ring {

/// The device that this process's tensors are on: that of the first of them. Thread: any.
class DeviceChoice {
 public:
  /// Shared by the engines that live now.
  static std::shared_ptr<DeviceChoice> of_process();

  /// Does nothing for the CPU. Errors: Error(kInvalidArgument) if there is another one already, or
  /// if the thread's stream is being captured into a CUDA graph.
  void use(c10::Device device);

  /// Notes the thread's current device, for a rank that has no tensor on one.
  void prefer_current();

  /// The device in use from now on: of the first tensor, or that which was preferred, or else the
  /// current one of that type. Errors: c10::Error if there is none.
  c10::Device get(c10::DeviceType type);

 private:
  std::mutex mutex_;
  std::optional<c10::Device> device_;
  std::optional<c10::Device> preferred_;
};

/// NCCL as the program's environment wants it.
struct NcclSettings {
  std::string library;    // its path, or empty
  bool blocking = false;  // NCCL_COMM_BLOCKING is set, which cannot be used here
};

/// Makes a device as DeviceExecutor::Make says. `timeout`: after which a collective that makes no
/// progress fails, also on the stream. `labels`: by rank.
std::unique_ptr<Device> make_accelerator(DeviceChoice& choice, c10::DeviceType type,
                                         Communicator& host, const Abort& abort,
                                         std::chrono::milliseconds timeout,
                                         const std::vector<std::string>& labels,
                                         const NcclSettings& settings);

}  // namespace torch_ring
