// take_expected(): what the ranks of an alltoall expect, compared with what the others send.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "engine/request.h"

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

/// The error of an alltoall in which a rank sends what another one does not expect, or nothing:
/// what they expect is gone from `rows` then. `name_of`: as errors call a rank.
std::optional<Error> misfit_of(const Fingerprint& fingerprint, std::vector<std::int64_t>& rows,
                               int size, const std::function<std::string(int)>& name_of);

}  // namespace torch_ring
