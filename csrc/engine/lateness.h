// Lateness: for which rank this one waits in agreements, summed up once a minute.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"

namespace torch_ring {

/// Takes note of the agreements for which this rank has waited, and says which rank was last in
/// most of them. Pure: the times are given.
///
/// All ranks but the late one would say the same. So only rank 0 speaks, or rank 1 of rank 0.
///
/// Thread: one at a time. Blocking: no. Cost of a wait that is not notable: a comparison.
class Lateness {
 public:
  // A rank that is this late costs more than a busy machine's noise.
  static constexpr std::chrono::milliseconds kNotable{10};
  static constexpr std::chrono::seconds kPeriod{60};
  static constexpr std::size_t kFewest = 10;  // waits in a period before anything is said of them

  Lateness(int rank, int size) : rank_(rank), waits_(static_cast<std::size_t>(size)) {}

  /// This rank has waited `lag` for an agreement, for `last` at the end (-1: unknown). Returns what
  /// to log of a period in which one rank was last in most of the notable waits, which is seldom
  /// anything.
  std::optional<std::string> note(int last, std::chrono::nanoseconds lag, Clock::time_point now) {
    if (lag < kNotable) return std::nullopt;
    return note_notable(last, lag, now);
  }

 private:
  std::optional<std::string> note_notable(int last, std::chrono::nanoseconds lag,
                                          Clock::time_point now);
  std::optional<std::string> sum_up() const;

  const int rank_;
  std::vector<std::vector<std::chrono::nanoseconds>> waits_;  // of this period, by the last rank
  std::optional<Clock::time_point> begin_;                    // of the period
};

}  // namespace torch_ring
