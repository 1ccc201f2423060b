// Names: the numbers that name requests without a name.
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <string>

#include "engine/request.h"

namespace torch_ring {

/// Numbers requests. Ranks that make the same requests in the same order number them alike. An era
/// begins when every rank waits for the same thing, so that ranks which had lost step agree again.
/// Thread: one at a time (with the lock of the RequestQueue).
class Names {
 public:
  /// The next name: "#7", or "#2.7" in a later era. Barriers are numbered apart, so that ranks
  /// which have submitted different numbers of requests still wait at the same barrier.
  std::string next(Collective collective) {
    std::string name = "#";
    if (era_ > 0) append(name, era_).push_back('.');
    if (collective == Collective::kBarrier) return append(name.append("barrier."), ++barriers_);
    return append(name, ++numbered_);
  }

  /// Begins an era.
  void renew() {
    ++era_;
    numbered_ = 0;
    barriers_ = 0;
  }

 private:
  static std::string& append(std::string& name, std::uint64_t number) {
    std::array<char, 20> digits;  // of the largest number
    const auto end = std::to_chars(digits.begin(), digits.end(), number).ptr;
    return name.append(digits.begin(), end);
  }

  std::uint64_t era_ = 0;
  std::uint64_t numbered_ = 0;
  std::uint64_t barriers_ = 0;
};

}  // namespace torch_ring
