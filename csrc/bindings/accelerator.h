// An accelerator of torch's, with NCCL on it.
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

/// The device that an engine's tensors are on: that of the first of them. One process drives one
/// device. Thread: any.
class DeviceChoice {
 public:
  /// Errors: Error(kInvalidArgument) if there is another one already, or if the thread's stream is
  /// being captured into a CUDA graph.
  void use(c10::Device device);

  /// The device in use, or else the current one of that type.
  c10::Device get(c10::DeviceType type) const;

 private:
  mutable std::mutex mutex_;
  std::optional<c10::Device> device_;
};

/// Makes a device as DeviceExecutor::Make says. `labels`: by rank. `library`: the path of NCCL, or
/// empty.
std::unique_ptr<Device> make_accelerator(c10::Device device, Communicator& host, const Abort& abort,
                                         std::chrono::milliseconds timeout,
                                         const std::vector<std::string>& labels,
                                         const std::string& library);

}  // namespace torch_ring
