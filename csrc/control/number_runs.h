// NumberRuns: a set of numbers, most of which follow one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace torch_ring {

/// Memory: for each run of consecutive numbers, not for each number. Cost: O(log runs).
class NumberRuns {
 public:
  void insert(std::uint64_t number) {
    if (contains(number)) return;
    const auto after = runs_.upper_bound(number);
    const bool joins_after = after != runs_.end() && after->first == number + 1;
    const std::uint64_t last = joins_after ? after->second : number;
    const bool joins_before =
        after != runs_.begin() && number != 0 && std::prev(after)->second == number - 1;
    if (joins_before) {
      std::prev(after)->second = last;
    } else {
      runs_.emplace_hint(after, number, last);
    }
    if (joins_after) runs_.erase(after);
  }

  void erase(std::uint64_t number) {
    if (!contains(number)) return;
    const auto run = std::prev(runs_.upper_bound(number));
    const std::uint64_t last = run->second;
    if (number < last) runs_.emplace(number + 1, last);
    if (run->first == number) {
      runs_.erase(run);
    } else {
      run->second = number - 1;
    }
  }

  bool contains(std::uint64_t number) const {
    const auto after = runs_.upper_bound(number);
    return after != runs_.begin() && number <= std::prev(after)->second;
  }

  /// The number of runs.
  std::size_t runs() const { return runs_.size(); }

 private:
  std::map<std::uint64_t, std::uint64_t> runs_;  // first -> last
};

}  // namespace torch_ring
