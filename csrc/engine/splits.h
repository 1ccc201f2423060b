// take_expected(): what the ranks of an alltoall expect, compared with what the others send.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_ring {

/// Rank `from` sends `sent` rows to rank `to`, which expects another number.
struct Misfit {
  int from;
  int to;
  std::int64_t sent;
  std::int64_t expected;
};

/// Takes what the ranks expect off `rows`, which then has what each sends to each. Returns the
/// first two ranks that differ. `rows`: of each rank those that it sends to each, and then those
/// that it expects of each. If these are not so many, they stay: whoever needs rows refuses them.
std::optional<Misfit> take_expected(std::vector<std::int64_t>& rows, int size);

}  // namespace torch_ring
