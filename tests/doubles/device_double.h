// SPDX-License-Identifier: Apache-2.0
// The device double: a stand-in for a GPU, as torch's device type PrivateUse1. Tests only.
//
// Its memory is the host's; its streams are the NCCL double's, and a stream's native_handle() is
// one. Unsynchronised accesses really race, and memory that is freed too early really becomes
// garbage, or another tensor's.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <functional>

namespace device_double {

/// This thread's current device.
c10::Device current_device();

/// Runs a task on the current stream of the current device.
void enqueue(std::function<void()> task);

/// Waits for the current stream of the current device.
void synchronize();

/// Whether all calls fail from now on, as after an error in a kernel. Thread: any.
void fail(bool fails);

c10::Allocator& device_memory();

}  // namespace device_double
