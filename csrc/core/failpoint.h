// SPDX-License-Identifier: Apache-2.0
// failpoint(): a place at which a test makes this process fail at an exact moment.
#pragma once

#include <atomic>
#include <string>

namespace torch_ring {

/// Arms failpoints, in place of all earlier ones; an empty `spec` arms none. CONTRIBUTING.md has
/// the syntax and the places.
/// Thread: any. Errors: Error(kInvalidArgument) that names TORCH_RING_FAIL.
void arm_failpoints(const std::string& spec);

/// The slow path of failpoint(), for armed places.
class Failpoints {
 public:
  static bool armed() noexcept { return armed_.load(std::memory_order_relaxed); }
  static bool reach(const char* place, int rank);

 private:
  friend void arm_failpoints(const std::string& spec);
  // A hint: reach() checks under a mutex. Tests arm before the ranks begin.
  static inline std::atomic<bool> armed_{false};
};

/// The calling thread has reached `place`, which belongs to `rank`. An armed failpoint kills or
/// stops the process here, or sleeps. Returns whether the code at `place` should fail, in the way
/// that CONTRIBUTING.md describes. Cost when nothing is armed: a relaxed load.
inline bool failpoint(const char* place, int rank) {
  return Failpoints::armed() && Failpoints::reach(place, rank);
}

}  // namespace torch_ring
