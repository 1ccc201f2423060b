// SPDX-License-Identifier: Apache-2.0
// Clock, kSpin, in_seconds(), in_ns(): the clock of all deadlines, the length of a spin, durations
// in messages, and times in records.
#pragma once

#include <chrono>
#include <cstdint>
#include <iomanip>
#include <sstream>
#include <string>

namespace torch_ring {

using Clock = std::chrono::steady_clock;

/// How long a rank spins before it sleeps, where every rank has a core. A wake-up costs 12 to 40 us
/// (docs/internals/measurements.md): a spin of that length costs at most twice the best choice.
inline constexpr std::chrono::microseconds kSpin{40};

/// "10 s", "0.25 s": a duration in a message.
inline std::string in_seconds(std::chrono::milliseconds duration) {
  std::ostringstream text;
  text << std::setprecision(12) << static_cast<double>(duration.count()) / 1000 << " s";
  return text.str();
}

/// A time of a record: nanoseconds since the clock's epoch.
inline std::int64_t in_ns(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace torch_ring
