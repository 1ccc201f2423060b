// SPDX-License-Identifier: Apache-2.0
// reduce_in_groups(): a local reduction, with the order of additions of an allreduce. Pure.
#pragma once

#include <span>
#include <vector>

#include "core/reduce.h"

namespace torch_ring {

/// reduce(), group by group: the inputs with the indices in `groups`, each group in the order
/// given, then the groups' results in sections_of() them. Partial results have the dtype that
/// travels between ranks, so the bits are those of an allreduce.
void reduce_in_groups(std::span<void* const> outputs, std::span<const void* const> inputs,
                      std::span<const std::vector<int>> groups, std::size_t count,
                      const Reduction& reduction);

}  // namespace torch_ring
