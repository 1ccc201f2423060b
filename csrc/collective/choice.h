// SPDX-License-Identifier: Apache-2.0
// choose_allreduce(), choose_allgather(), ...: the algorithm of a collective between hosts. Pure.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_ring {

/// The costs of a network, in picoseconds. Integers: all ranks must choose the same algorithm, also
/// on processors that round differently.
struct NetworkCost {
  std::uint64_t latency_ps;    // of a step: an empty message
  std::uint64_t near_ps;       // of a byte to the next rank
  std::uint64_t far_ps;        // of a byte to any rank, when every rank sends at once
  std::uint64_t reduction_ps;  // of a byte that is reduced
};

/// TCP over Ethernet of 25 Gbit/s; docs/internals/measurements.md has the reasons. A constant,
/// because all ranks must choose alike.
inline constexpr NetworkCost kEthernet{30'000'000, 400, 500, 100};

/// Up to this number of ranks the choice depends on the size alone: a logarithmic algorithm saves
/// only a step or two.
inline constexpr int kFewRanks = 4;

/// The most bytes of an allreduce that gathers all inputs, since every rank holds them all. The
/// same limit holds for the root of a reduce, except between two ranks, where no algorithm has
/// fewer steps or bytes.
inline constexpr std::size_t kGatheredBytes = 64u << 10;

/// Bytes of a segment, which is reduced or forwarded while the next one travels: small enough for
/// the L2 cache, large enough to make the cost of a system call small.
inline constexpr std::size_t kSegmentBytes = 256u << 10;

/// Bytes of a rank's chunk (for each socket) and of a round. A reduction runs in rounds, which fit
/// the cache and bound the scratch memory for the other ranks' inputs of a chunk. A ring has one
/// chunk in flight at a time, so its chunk grows with the number of sockets.
inline constexpr std::size_t kChunkBytes = 1u << 20;
inline constexpr std::size_t kRoundBytes = 64u << 20;

enum class AllreducePath {
  kGathered,   // all inputs to all ranks
  kScattered,  // scatter_levels(), then an allgather
};

enum class ReducePath {
  kDirect,     // all inputs to the root
  kScattered,  // scatter_levels(), then a gather
};

enum class AllgatherPath {
  kRing,
  kDoubling,  // bruck_steps()
};

enum class BroadcastPath {
  kChain,
  kTree,
  kScattered,  // a chunk to each rank down the tree, then bruck_steps()
};

/// The time of a collective of `bytes` (of an allgather: of all parts): the latency of its steps,
/// the transfer of its bytes, and the part of a reduction that does not overlap with a transfer.
/// `ranks` is at least 2.
std::uint64_t time_ps(AllreducePath path, std::size_t bytes, int ranks, const NetworkCost& cost);
std::uint64_t time_ps(ReducePath path, std::size_t bytes, int ranks, const NetworkCost& cost);
std::uint64_t time_ps(AllgatherPath path, std::size_t bytes, int ranks, const NetworkCost& cost);
std::uint64_t time_ps(BroadcastPath path, std::size_t bytes, int ranks, const NetworkCost& cost);

/// The path with the shortest time; in a tie the first in the enumeration. Up to kFewRanks ranks
/// have rules of their own.
AllreducePath choose_allreduce(std::size_t bytes, int ranks, const NetworkCost& cost = kEthernet);
ReducePath choose_reduce(std::size_t bytes, int ranks, const NetworkCost& cost = kEthernet);
AllgatherPath choose_allgather(std::size_t bytes, int ranks, const NetworkCost& cost = kEthernet);
BroadcastPath choose_broadcast(std::size_t bytes, int ranks, const NetworkCost& cost = kEthernet);

}  // namespace torch_ring
