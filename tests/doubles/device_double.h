// A stand-in for a GPU, as torch's device type PrivateUse1: its memory is the host's, its streams
// are those of the NCCL double, which are also what native_handle() of a stream is. What is not
// synchronized really races, and what is freed too early really is garbage. Tests only.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <functional>

namespace device_double {

/// This thread's.
c10::Device current_device();

/// Runs a task on the current stream of the current device.
void enqueue(std::function<void()> task);

/// Waits for that stream.
void synchronize();

c10::Allocator& device_memory();

}  // namespace device_double
