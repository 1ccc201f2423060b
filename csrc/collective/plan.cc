// SPDX-License-Identifier: Apache-2.0
#include "collective/plan.h"

#include <algorithm>

#include "core/at.h"

namespace torch_ring {

namespace {

/// `rank` + `distance` around the ring, for any distance above -2 * size.
int around(int rank, int distance, int size) { return (rank + distance + 2 * size) % size; }

/// Ranks in rows of one from each section: row i has the ranks that divide the i-th arc. The last
/// ranks, which do not fill a row, have no arc.
struct Grid {
  int sections;
  int arcs;

  explicit Grid(int size)
      : sections((size + kSectionRanks - 1) / kSectionRanks), arcs(size / sections) {}
  int section_of(int rank) const { return rank % sections; }
};

}  // namespace

std::vector<Range> ranges_of(std::size_t count, std::size_t longest) {
  std::vector<Range> ranges;
  for (std::size_t begin = 0; begin < count; begin += longest) {
    ranges.push_back({begin, std::min(longest, count - begin)});
  }
  return ranges;
}

std::vector<Range> ranges_of(std::span<const std::size_t> counts) {
  std::vector<Range> ranges;
  std::size_t begin = 0;
  for (const std::size_t count : counts) {
    ranges.push_back({begin, count});
    begin += count;
  }
  return ranges;
}

std::vector<Range> rotated_ranges(std::span<const std::size_t> counts, int rank) {
  const int size = static_cast<int>(counts.size());
  std::vector<Range> ranges(counts.size());
  std::size_t begin = 0;
  for (int distance = 1; distance < size; ++distance) {
    const auto peer = static_cast<std::size_t>(around(rank, distance, size));
    ranges[peer] = {begin, counts[peer]};
    begin += counts[peer];
  }
  return ranges;
}

std::span<const std::size_t> row_of(std::span<const std::size_t> matrix, int size, int from) {
  return matrix.subspan(static_cast<std::size_t>(from * size), static_cast<std::size_t>(size));
}

std::vector<std::size_t> column_of(std::span<const std::size_t> matrix, int size, int to) {
  std::vector<std::size_t> column;
  for (int from = 0; from < size; ++from) {
    column.push_back(at(matrix, from * size + to));
  }
  return column;
}

std::vector<std::vector<int>> sections_of(int size) {
  const Grid grid(size);
  std::vector<std::vector<int>> sections(static_cast<std::size_t>(grid.sections));
  for (int rank = 0; rank < size; ++rank) at(sections, grid.section_of(rank)).push_back(rank);
  return sections;
}

std::vector<ScatterLevel> scatter_levels(int rank, int size) {
  std::vector<ScatterLevel> levels;
  int first = 0;  // of the consecutive ranks that divide the same chunks
  while (size > 1) {
    const Grid grid(size);
    ScatterLevel level;
    level.section = at(sections_of(size), grid.section_of(rank - first));
    level.index = (rank - first) / grid.sections;
    level.arcs = grid.arcs;
    level.first_chunk = first;
    level.chunks = grid.sections;
    for (int& member : level.section) member += first;
    const bool has_arc = level.index < level.arcs;
    first += level.index * level.chunks;
    levels.push_back(std::move(level));
    if (!has_arc) break;
    size = grid.sections;
  }
  return levels;
}

std::vector<Range> chunks_by_rank(std::size_t count, int size) {
  const auto has_chunk = [](int rank, int ranks) {
    while (ranks > 1) {
      const Grid grid(ranks);
      if (rank >= grid.arcs * grid.sections) return false;
      rank %= grid.sections;
      ranks = grid.sections;
    }
    return true;
  };
  int owners = 0;
  for (int rank = 0; rank < size; ++rank) owners += has_chunk(rank, size) ? 1 : 0;
  std::vector<Range> chunks;
  int index = 0;
  for (int rank = 0; rank < size; ++rank) {
    const Range chunk = chunk_of(count, owners, index);
    const bool has = has_chunk(rank, size);
    chunks.push_back({chunk.begin, has ? chunk.count : 0});
    index += has ? 1 : 0;
  }
  return chunks;
}

std::vector<RingStep> allgather_steps(int rank, int size) {
  std::vector<RingStep> steps;
  for (int step = 0; step < size - 1; ++step) {
    steps.push_back({around(rank, -step, size), around(rank, -1 - step, size)});
  }
  return steps;
}

std::vector<BruckStep> bruck_steps(int rank, int size) {
  std::vector<BruckStep> steps;
  for (int distance = 1; distance < size; distance *= 2) {
    steps.push_back({around(rank, -distance, size), around(rank, distance, size),
                     std::min(distance, size - distance)});
  }
  return steps;
}

std::array<Range, 2> arc_of(std::span<const Range> chunks, int first, int count) {
  const auto range = [&](std::size_t begin, std::size_t end) -> Range {
    if (begin == end) return {};
    const Range& last = chunks[end - 1];
    return {chunks[begin].begin, last.begin + last.count - chunks[begin].begin};
  };
  const auto begin = static_cast<std::size_t>(first);
  const std::size_t end = begin + static_cast<std::size_t>(count);
  const std::size_t inside = std::min(end, chunks.size());
  return {range(begin, inside), range(0, end - inside)};
}

Tree binomial_tree(int rank, int size, int root) {
  const int self = around(rank, -root, size);  // how far after the root
  const auto edge = [&](int peer, int first, int distance) -> TreeEdge {
    return {around(root, peer, size), first, std::min(distance, size - first)};
  };
  int below = 1;  // the distance to the parent: the lowest bit of `self`
  while (below < size && (self & below) == 0) below *= 2;

  Tree tree;
  if (self > 0) tree.parent = edge(self - below, self, below);
  for (int distance = below / 2; distance > 0; distance /= 2) {
    const int child = self + distance;
    if (child < size) tree.children.push_back(edge(child, child, distance));
  }
  return tree;
}

}  // namespace torch_ring
