// EngineConfig: the settings of an engine, read from the environment by torch_ring/config.py.
#pragma once

#include <chrono>
#include <cstddef>

namespace torch_ring {

struct EngineConfig {
  std::chrono::milliseconds timeout{300'000};       // no progress for this long is an error
  std::chrono::milliseconds stall_warning{60'000};  // 0: never
  std::chrono::microseconds fusion_window{1'000};   // how long requests are collected
  std::size_t fusion_threshold_bytes = 64u << 20;   // requests fused into one collective
  std::size_t arena_bytes = 0;  // a rank's address space for buckets; 0: the host's memory
};

}  // namespace torch_ring
