// Looks: what a rank that is often late was found to do while this one waited for it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>

#include "core/clock.h"

namespace torch_ring {

/// The answers to looks, which are questions to a rank that this one waits for. An answer that
/// comes late, or when the wait is over, tells nothing of it: what kept the rank kept the answer,
/// too, if it had time for one. Pure: the times are given.
///
/// Thread: one at a time. Blocking: no.
class Looks {
 public:
  static constexpr std::size_t kMost = 100;                   // of a rank, the latest
  static constexpr std::chrono::milliseconds kPatience{100};  // a longer one is silence
  static constexpr std::chrono::milliseconds kPrompt{20};  // for an answer, before none is silence

  /// Rank `rank` was asked; `number`: of the question.
  void begin(std::uint64_t number, int rank, Clock::time_point now);

  /// The wait in which it was asked is over: no answer is silence, if there was time for one.
  void end(std::uint64_t number, Clock::time_point now);

  /// Takes rank `from`'s answer: what it does and, on lines of their own, where, and what it had
  /// not come to, "computing\nin f\nbucket 1". One that is empty counts for nothing. Returns
  /// whether the question was a look.
  bool learn(std::uint64_t number, int from, std::string_view answer, Clock::time_point now);

  /// "asleep in 24 of 30 looks, or 40 ms (at last in f (train.py:3)), computing in 6, or 10 ms
  /// (...); in 28 of them before bucket 1"; empty before any. `wait`: for this rank, in the median.
  std::string describe(int rank, std::chrono::nanoseconds wait) const;

 private:
  struct Look {
    int rank = 0;
    Clock::time_point since;
    bool is_over = false;
  };
  struct Finding {
    std::string what;
    std::string where{};   // may be empty
    std::string before{};  // may be empty
  };

  void add(int rank, Finding finding);

  std::map<std::uint64_t, Look> unanswered_;  // by number
  std::map<int, std::deque<Finding>> found_;  // by rank
};

}  // namespace torch_ring
