// call_bounded(): a call that may hang, on a thread of its own.
#pragma once

#include <chrono>
#include <functional>

namespace torch_ring::nccl {

/// Calls `function` on another thread, and waits for it. Returns whether it has returned within
/// `patience`. If not, that thread is left behind: so `function` owns what it uses. It runs on the
/// calling thread where no other can be started.
/// Thread: any. Blocking: for `patience` at most.
bool call_bounded(std::function<void()> function, std::chrono::milliseconds patience);

}  // namespace torch_ring::nccl
