#include "collective/plan.h"

#include <algorithm>

#include "core/at.h"

namespace torch_ring {

namespace {

/// `rank` + `distance` around the ring, for any distance above -2 * size.
int around(int rank, int distance, int size) { return (rank + distance + 2 * size) % size; }

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

std::vector<RingStep> reduce_scatter_steps(int rank, int size) {
  std::vector<RingStep> steps;
  for (int step = 0; step < size - 1; ++step) {
    steps.push_back({around(rank, -1 - step, size), around(rank, -2 - step, size)});
  }
  return steps;
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

}  // namespace torch_ring
