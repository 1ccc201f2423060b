// EngineConfig: the settings of an engine, read from the environment by torch_ring/config/.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>

#include "core/clock.h"

namespace torch_ring {

struct EngineConfig {
  std::chrono::milliseconds timeout{0};             // a rank that is later is an error; 0: never
  std::string timeout_name = "TORCH_RING_TIMEOUT";  // what errors call it
  std::chrono::milliseconds stall_warning{60'000};  // 0: never
  std::chrono::microseconds fusion_window{1'000};   // how long requests are collected
  std::size_t fusion_threshold_bytes = 64u << 20;   // requests fused into one collective
  // An operation for which all ranks wait in vain is a mismatch after this, if they have threads
  // that may yet submit something.
  std::chrono::milliseconds other_threads_grace{10'000};
  std::size_t arena_bytes = 0;  // a rank's address space for buckets; 0: the host's memory

  /// The timeout as errors say it: "300 s (TORCH_RING_TIMEOUT)".
  std::string timeout_text() const { return in_seconds(timeout) + " (" + timeout_name + ")"; }

  /// How long a transfer that has begun may stand still. All ranks are in it, or on their way, so
  /// a live rank that does not go on is stuck, and not late.
  std::chrono::milliseconds transfer_timeout() const {
    return timeout.count() > 0 ? timeout : std::chrono::minutes(5);
  }

  /// How long a rank waits before it tells the others for whom (WaitGraph): well before it accuses
  /// one of them.
  std::chrono::milliseconds patience() const {
    std::chrono::milliseconds first = std::chrono::minutes(1);
    if (timeout.count() > 0) first = std::min(first, timeout);
    if (stall_warning.count() > 0) first = std::min(first, stall_warning);
    return first / 4;
  }
};

}  // namespace torch_ring
