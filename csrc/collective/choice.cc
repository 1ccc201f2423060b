// SPDX-License-Identifier: Apache-2.0
#include "collective/choice.h"

#include <algorithm>
#include <array>
#include <bit>

#include "collective/plan.h"

namespace torch_ring {

namespace {

/// ceil(log2(ranks)).
std::uint64_t doublings(std::uint64_t ranks) {
  return static_cast<std::uint64_t>(std::bit_width(ranks - 1));
}

/// The most bytes left to reduce when the last byte of a step arrives.
std::uint64_t last_segment(std::uint64_t bytes) {
  return std::min<std::uint64_t>(bytes, kSegmentBytes);
}

std::uint64_t gathered_ps(std::uint64_t bytes, std::uint64_t ranks, const NetworkCost& cost) {
  return doublings(ranks) * cost.latency_ps + bytes * (ranks - 1) * cost.far_ps +
         bytes * ranks * cost.reduction_ps;
}

std::uint64_t levels_of(std::uint64_t ranks) {
  std::uint64_t levels = 0;
  for (; ranks > 1; ++levels) ranks = (ranks + kSectionRanks - 1) / kSectionRanks;
  return levels;
}

std::uint64_t scattered_ps(std::uint64_t bytes, std::uint64_t ranks, const NetworkCost& cost) {
  const auto round_ps = [&](std::uint64_t part) {
    const AllgatherPath gather = choose_allgather(part, static_cast<int>(ranks), cost);
    return levels_of(ranks) * cost.latency_ps + (part - part / ranks) * cost.far_ps +
           last_segment(part / ranks) * ranks * cost.reduction_ps +
           time_ps(gather, part, static_cast<int>(ranks), cost);
  };
  const std::uint64_t round = std::min<std::uint64_t>(kChunkBytes * ranks, kRoundBytes);
  const std::uint64_t rest = bytes % round;
  return bytes / round * round_ps(round) + (rest > 0 ? round_ps(rest) : 0);
}

/// The number of exchanges in which one rank serves all others, as many at once as a section has.
std::uint64_t turns_of(std::uint64_t ranks) {
  return (ranks + kSectionRanks - 3) / (kSectionRanks - 1);
}

std::uint64_t direct_ps(std::uint64_t bytes, std::uint64_t ranks, const NetworkCost& cost) {
  return turns_of(ranks) * cost.latency_ps + bytes * (ranks - 1) * cost.far_ps +
         last_segment(bytes) * ranks * cost.reduction_ps;
}

std::uint64_t scattered_reduce_ps(std::uint64_t bytes, std::uint64_t ranks,
                                  const NetworkCost& cost) {
  const std::uint64_t moved = bytes - bytes / ranks;  // in each half
  return (levels_of(ranks) + turns_of(ranks)) * cost.latency_ps + 2 * moved * cost.far_ps +
         last_segment(bytes / ranks) * ranks * cost.reduction_ps;
}

/// The time of `bytes` in segments. The last one counts by its bytes, so that the time grows with
/// the size, and each algorithm is the fastest in one interval of sizes.
std::uint64_t in_segments(std::uint64_t segment_ps, std::uint64_t bytes) {
  return segment_ps +
         (bytes - std::min<std::uint64_t>(bytes, kSegmentBytes)) * (segment_ps / kSegmentBytes);
}

std::uint64_t chain_ps(std::uint64_t bytes, std::uint64_t ranks, const NetworkCost& cost) {
  return (ranks - 2) * (cost.latency_ps + last_segment(bytes) * cost.near_ps) +
         in_segments(cost.latency_ps, bytes) + bytes * cost.near_ps;
}

/// The path with the shortest time, the first of equal ones.
template <class Path, std::size_t kPaths>
Path fastest(const std::array<Path, kPaths>& paths, std::size_t bytes, int ranks,
             const NetworkCost& cost) {
  return *std::min_element(paths.begin(), paths.end(), [&](Path a, Path b) {
    return time_ps(a, bytes, ranks, cost) < time_ps(b, bytes, ranks, cost);
  });
}

}  // namespace

std::uint64_t time_ps(AllreducePath path, std::size_t bytes, int ranks, const NetworkCost& cost) {
  const auto size = static_cast<std::uint64_t>(ranks);
  switch (path) {
    case AllreducePath::kGathered:
      return gathered_ps(bytes, size, cost);
    case AllreducePath::kScattered:
      return scattered_ps(bytes, size, cost);
  }
  return 0;
}

std::uint64_t time_ps(ReducePath path, std::size_t bytes, int ranks, const NetworkCost& cost) {
  const auto size = static_cast<std::uint64_t>(ranks);
  return path == ReducePath::kDirect ? direct_ps(bytes, size, cost)
                                     : scattered_reduce_ps(bytes, size, cost);
}

std::uint64_t time_ps(AllgatherPath path, std::size_t bytes, int ranks, const NetworkCost& cost) {
  const auto size = static_cast<std::uint64_t>(ranks);
  const std::uint64_t received = bytes - bytes / size;
  return path == AllgatherPath::kRing ? (size - 1) * cost.latency_ps + received * cost.near_ps
                                      : doublings(size) * cost.latency_ps + received * cost.far_ps;
}

std::uint64_t time_ps(BroadcastPath path, std::size_t bytes, int ranks, const NetworkCost& cost) {
  const auto size = static_cast<std::uint64_t>(ranks);
  switch (path) {
    case BroadcastPath::kChain:
      return chain_ps(bytes, size, cost);
    case BroadcastPath::kTree:
      return doublings(size) * (cost.latency_ps + bytes * cost.far_ps);
    case BroadcastPath::kScattered:
      return 2 * (doublings(size) * cost.latency_ps + (bytes - bytes / size) * cost.far_ps);
  }
  return 0;
}

AllreducePath choose_allreduce(std::size_t bytes, int ranks, const NetworkCost& cost) {
  using enum AllreducePath;
  if (bytes > kGatheredBytes) return kScattered;
  if (ranks <= kFewRanks) return kGathered;
  return fastest(std::array{kGathered, kScattered}, bytes, ranks, cost);
}

ReducePath choose_reduce(std::size_t bytes, int ranks, const NetworkCost& cost) {
  using enum ReducePath;
  if (ranks == 2) return kDirect;
  if (bytes > kGatheredBytes) return kScattered;
  if (ranks <= kFewRanks) return kDirect;
  return fastest(std::array{kDirect, kScattered}, bytes, ranks, cost);
}

AllgatherPath choose_allgather(std::size_t bytes, int ranks, const NetworkCost& cost) {
  using enum AllgatherPath;
  if (ranks <= kFewRanks) return kRing;
  return fastest(std::array{kRing, kDoubling}, bytes, ranks, cost);
}

BroadcastPath choose_broadcast(std::size_t bytes, int ranks, const NetworkCost& cost) {
  using enum BroadcastPath;
  if (ranks <= kFewRanks) return kChain;
  return fastest(std::array{kChain, kTree, kScattered}, bytes, ranks, cost);
}

}  // namespace torch_ring
