// monitored_barrier(): a barrier over a store, which tells which ranks have not come.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torch_ring {

/// Blocks until all ranks have come. Rank 0 calls the others, looks for their keys in the store, in
/// their order, answers each, and waits until they have read that: the store may end with it. The
/// messages begin as gloo's, on which programs rely.
/// Cost: three keys for each rank, which later barriers use again, and a look at the store every
/// 10 ms at most.
///
/// Args:
///   number: of this barrier in its group, the same on all ranks.
///   wait_for_all_ranks: whether rank 0 names all ranks that have not come, or the first one only.
///   check: throws if the group has ended.
///
/// Errors: Error(kTimeout) on rank 0: names the missing ranks; on the others: rank 0 has not
/// answered. What `check` throws.
void monitored_barrier(c10d::Store& store, int rank, int size, std::uint64_t number,
                       std::chrono::milliseconds timeout, bool wait_for_all_ranks,
                       const std::function<void()>& check);

}  // namespace torch_ring
