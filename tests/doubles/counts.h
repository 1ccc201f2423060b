// SPDX-License-Identifier: Apache-2.0
// Counts: what the program has asked of the device double. Python reads it by ringdouble::counts().
#pragma once

#include <atomic>
#include <cstdint>

namespace device_double {

/// Requests of this process to a GPU, on all streams. What the double does
/// besides, such as waiting for a stream before it runs an operator on the CPU, is not counted.
/// Thread: any.
struct Counts {
  std::atomic<std::int64_t> kernels{0};     // operators that compute, or copy several tensors
  std::atomic<std::int64_t> copies{0};      // of one tensor
  std::atomic<std::int64_t> recorded{0};    // events
  std::atomic<std::int64_t> awaited{0};     // events, by a stream
  std::atomic<std::int64_t> host_waits{0};  // for a stream, an event or a device
};

inline Counts counts;

/// While one lives, what this thread does is the double's own business, and is not counted.
class Uncounted {
 public:
  Uncounted() { ++depth_; }
  ~Uncounted() { --depth_; }
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
  static bool now() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

inline void count(std::atomic<std::int64_t>& counter) {
  if (!Uncounted::now()) ++counter;
}

}  // namespace device_double
