// ranges_of(), reduce_scatter_steps(), ...: pure functions of rank and size that list the steps of
// an algorithm. The code that does I/O walks these lists.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "collective/chunk.h"

namespace torch_ring {

/// Consecutive ranges of at most `longest` elements that cover `count`; none if `count` is 0.
std::vector<Range> ranges_of(std::size_t count, std::size_t longest);

/// Consecutive ranges of the given lengths.
std::vector<Range> ranges_of(std::span<const std::size_t> counts);

/// Consecutive ranges of the given lengths in the order rank + 1, rank + 2, ... (mod size), so that
/// the ranks begin with different receivers. The range of `rank` itself is empty.
std::vector<Range> rotated_ranges(std::span<const std::size_t> counts, int rank);

/// The row (lengths that `from` sends to each rank) and the column (lengths that `to` receives from
/// each rank) of an alltoall's matrix.
std::span<const std::size_t> row_of(std::span<const std::size_t> matrix, int size, int from);
std::vector<std::size_t> column_of(std::span<const std::size_t> matrix, int size, int to);

/// One step of a ring: a rank sends chunk `send` to the next rank while it receives chunk `receive`
/// from the previous one.
struct RingStep {
  int send;
  int receive;
  bool operator==(const RingStep&) const = default;
};

/// size - 1 steps. Each sends the chunk that the step before received; the last receives chunk
/// `rank`, to which all other ranks have added theirs.
std::vector<RingStep> reduce_scatter_steps(int rank, int size);

/// size - 1 steps after which every rank has every chunk. Each rank begins by sending its own.
std::vector<RingStep> allgather_steps(int rank, int size);

/// One step of Bruck's allgather. A rank has the entries of rank, rank + 1, ... (mod size); it
/// sends the first `count` of them to `to` and receives the next `count` from `from`.
struct BruckStep {
  int to;
  int from;
  int count;
  bool operator==(const BruckStep&) const = default;
};

/// ceil(log2(size)) steps at distances 1, 2, 4, ...; no rank is `from` twice, nor `to`.
/// J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
/// message-passing systems", IEEE TPDS 8(11), 1997.
std::vector<BruckStep> bruck_steps(int rank, int size);

/// A reduce-scatter for any size in ceil(log2(size)) steps: Bruck's allgather backwards. In a step
/// a rank sends its partial results of the chunks `to`, `to` + 1, ... (mod size), `count` of them,
/// to rank `to`, receives those of the chunks `rank`, `rank` + 1, ... from rank `from`, and adds
/// them to its own. After the last step its chunk `rank` is complete. Each rank sends size - 1
/// chunks. J. L. Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024.
std::vector<BruckStep> halving_steps(int rank, int size);

/// The elements of `count` of the consecutive `chunks`: those from `first` to the last one, and
/// those from chunk 0 on. The second range is empty unless the chunks go around the end.
std::array<Range, 2> arc_of(std::span<const Range> chunks, int first, int count);

/// An edge of a binomial tree. It leads to `peer`; below it are the ranks of the chunks `first`,
/// `first` + 1, ..., `count` of them, where chunk i belongs to the i-th rank after the root.
struct TreeEdge {
  int peer;
  int first;
  int count;
  bool operator==(const TreeEdge&) const = default;
};

/// A rank's edges; a root has no parent. The children's subtrees shrink, so that a rank serves the
/// child first that has most to pass on.
struct Tree {
  std::optional<TreeEdge> parent;
  std::vector<TreeEdge> children;
};

/// The tree of `root` has ceil(log2(size)) levels, and every edge leads over a distance of Bruck's.
Tree binomial_tree(int rank, int size, int root);

}  // namespace torch_ring
