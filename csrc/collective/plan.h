// Plans of transfers: pure functions of rank and size that list the steps of an algorithm. The code
// that does I/O walks these lists.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/chunk.h"

namespace torch_ring {

/// Consecutive ranges of at most `longest` that cover `count`; none if that is 0.
std::vector<Range> ranges_of(std::size_t count, std::size_t longest);

/// Ranges of the given lengths, one after the other.
std::vector<Range> ranges_of(std::span<const std::size_t> counts);

/// Ranges of the given lengths in the order rank + 1, rank + 2, ... around the ranks; that of
/// `rank` itself is empty. In such an order the ranks begin with different receivers.
std::vector<Range> rotated_ranges(std::span<const std::size_t> counts, int rank);

/// What `from` sends to each, and what `to` receives from each, by the matrix of an alltoall.
std::span<const std::size_t> row_of(std::span<const std::size_t> matrix, int size, int from);
std::vector<std::size_t> column_of(std::span<const std::size_t> matrix, int size, int to);

/// One step of a ring: chunk `send` goes to the next rank while chunk `receive` comes from the
/// previous one.
struct RingStep {
  int send;
  int receive;
  bool operator==(const RingStep&) const = default;
};

/// size - 1 steps, after which this rank has received chunk `rank` last, from all others: each step
/// sends the chunk that the step before received.
std::vector<RingStep> reduce_scatter_steps(int rank, int size);

/// size - 1 steps that bring every rank every other rank's chunk, beginning with its own.
std::vector<RingStep> allgather_steps(int rank, int size);

/// One step of Bruck's allgather: a rank that has the entries of the ranks rank, rank + 1, ...
/// (mod size) sends the first `count` of them to `to`, and receives the next `count` from `from`.
struct BruckStep {
  int to;
  int from;
  int count;
  bool operator==(const BruckStep&) const = default;
};

/// ceil(log2(size)) steps at distances 1, 2, 4, ...; no rank is a `from`, or a `to`, twice.
/// J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
/// message-passing systems", IEEE TPDS 8(11), 1997.
std::vector<BruckStep> bruck_steps(int rank, int size);

}  // namespace torch_ring
