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
/// All ranks but the late one would say the same. So only rank 0 speaks, or rank 1 of rank 0. It is
/// also the one that looks what the late rank does instead.
///
/// Thread: one at a time. Blocking: no. Cost of a wait that is not notable: a comparison.
class Lateness {
 public:
  // A rank that is this late costs more than a busy machine's noise.
  static constexpr std::chrono::milliseconds kNotable{10};
  static constexpr std::chrono::seconds kPeriod{60};
  static constexpr std::size_t kFewest = 10;  // waits in a period before anything is said of them
  static constexpr std::size_t kFewestToLook = 3;
  static constexpr int kLooks = 30;  // in a period

  /// What to log of a period in which one rank was last in most of the notable waits.
  struct Summary {
    int rank;
    std::chrono::nanoseconds median;  // of the waits for it
    std::string text;
  };

  Lateness(int rank, int size) : rank_(rank), waits_(static_cast<std::size_t>(size)) {}

  /// This rank has waited `lag` for an agreement, for `last` at the end (-1: unknown). Returns what
  /// to log, which is seldom anything.
  std::optional<Summary> note(int last, std::chrono::nanoseconds lag, Clock::time_point now) {
    if (lag < kNotable) return std::nullopt;
    return note_notable(last, lag, now);
  }

  /// The rank that most of the time of the notable waits was for, if this one is to look what it
  /// does: not without end.
  std::optional<int> suspect() const { return looks_left_ > 0 ? suspect_ : std::nullopt; }

  /// How long to wait for the suspect before looking; maybe longer than it keeps this rank waiting.
  /// If the waits for it were one, the looks would lie at equal distances: what is found twice as
  /// often took twice the time. The first kNotable of a wait have none, as shorter waits do not
  /// count.
  Clock::duration look_after() const { return next_look_ - waited_; }

  /// This rank has looked.
  void looked() {
    --looks_left_;
    next_look_ += distance_;
  }

 private:
  std::optional<Summary> note_notable(int last, std::chrono::nanoseconds lag,
                                      Clock::time_point now);
  std::size_t all() const;
  std::optional<int> last_in_most() const;
  std::optional<int> waited_for_most() const;
  template <class Weight>
  std::optional<int> largest(Weight weight) const;
  std::optional<Summary> sum_up() const;
  void plan_looks(std::optional<int> suspect_before);

  const int rank_;
  std::vector<std::vector<std::chrono::nanoseconds>> waits_;  // of this period, by the last rank
  std::optional<Clock::time_point> begin_;                    // of the period
  std::optional<int> suspect_;
  // Of the suspect, in this period: the sum of its waits, when in that sum the next look is due,
  // and how far it is from one to the next.
  Clock::duration waited_{0};
  Clock::duration next_look_ = kNotable;
  Clock::duration distance_ = kNotable;
  int looks_left_ = kLooks;
};

}  // namespace torch_ring
