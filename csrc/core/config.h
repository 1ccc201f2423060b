// EngineConfig: the settings of an engine; torch_ring/config.py reads them from the environment.
#pragma once

#include <chrono>
#include <cstddef>

namespace torch_ring {

struct EngineConfig {
  std::chrono::milliseconds timeout{300'000};           // no progress for this long is an error
  std::chrono::milliseconds heartbeat_timeout{60'000};  // a silent process is lost after this
  std::chrono::milliseconds stall_warning{60'000};      // 0: never
  std::chrono::microseconds fusion_window{1'000};       // how long requests are collected
  std::size_t fusion_threshold_bytes = 64u << 20;       // requests fused into one collective
  std::size_t arena_bytes = 0;  // address space of bucket memory a rank; 0: the host's memory
};

}  // namespace torch_ring
