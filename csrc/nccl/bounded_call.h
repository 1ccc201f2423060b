// SPDX-License-Identifier: Apache-2.0
// call_aside(), call_bounded(): calls that may hang, on threads of their own.
#pragma once

#include <chrono>
#include <functional>

namespace torch_ring::nccl {

/// Calls `function` on another thread, and does not wait for it: it must own all that it uses.
/// Returns false if no thread can be started. Thread: any. Blocking: no.
bool call_aside(std::function<void()> function);

/// Calls `function` on another thread, and waits for it. Returns whether it has returned within
/// `patience`. If not, that thread is left behind, so `function` must own all that it uses. If no
/// thread can be started, it runs on the calling thread.
/// Thread: any. Blocking: for `patience` at most.
bool call_bounded(std::function<void()> function, std::chrono::milliseconds patience);

}  // namespace torch_ring::nccl
