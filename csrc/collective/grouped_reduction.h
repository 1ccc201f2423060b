// reduce_in_groups(): the reduction of inputs that lie on one rank, in the order of additions that
// an allreduce has. Pure.
#pragma once

#include <span>
#include <vector>

#include "core/reduce.h"

namespace torch_ring {

/// reduce(), group by group: the inputs with the indices in `groups`, each group in the order
/// given, then the groups' results in sections_of() them. Partial results are those that travel
/// between ranks, so the bits are those of such ranks.
void reduce_in_groups(std::span<void* const> outputs, std::span<const void* const> inputs,
                      std::span<const std::vector<int>> groups, std::size_t count,
                      const Reduction& reduction);

}  // namespace torch_ring
