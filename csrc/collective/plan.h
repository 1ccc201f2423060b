// SPDX-License-Identifier: Apache-2.0
// ranges_of(), scatter_levels(), ...: pure functions of rank and size that list the steps of
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

/// The most ranks of a section. Its members exchange data all at once, so that a level of a
/// reduce-scatter takes one message's latency; more would need more descriptors than a Doorbell
/// polls.
inline constexpr int kSectionRanks = 16;

/// The ranks 0 to `size` - 1 in sections. Each section is reduced first, in the order of its ranks;
/// then the sections' results are reduced in the same way, and so on. Up to kSectionRanks are one
/// section.
///
/// The order of the additions depends on `size` alone, not on the place of an element in a buffer.
/// So the bits of a sum do not depend on the other tensors in the buffer.
std::vector<std::vector<int>> sections_of(int size);

/// A rank's part in one level of a reduce-scatter. Each member of its section sends every other
/// one the arc of chunks that the receiver reduces: to the i-th member `chunks` chunks from
/// `first_chunk` + i * `chunks` on. The last member may have none: it only sends.
struct ScatterLevel {
  std::vector<int> section;  // ranks, in the order of the additions
  int index;                 // of this rank in it
  int arcs;                  // members with an arc
  int first_chunk;
  int chunks;
};

/// The levels of a rank: one for up to kSectionRanks ranks, about log16(size) for more. After the
/// last one the rank's chunk is complete. Chunks: chunks_by_rank(). Each rank sends about size - 1
/// chunks.
std::vector<ScatterLevel> scatter_levels(int rank, int size);

/// The chunks of `count` elements, by rank: consecutive, and empty for a rank that has no arc on
/// some level. Their lengths are those of chunk_of().
std::vector<Range> chunks_by_rank(std::size_t count, int size);

/// One step of a ring: a rank sends chunk `send` to the next rank while it receives chunk `receive`
/// from the previous one.
struct RingStep {
  int send;
  int receive;
  bool operator==(const RingStep&) const = default;
};

/// size - 1 steps, after which every rank has every chunk. Each rank first sends its own.
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

/// The elements of `count` consecutive `chunks` from `first` on, around the end: up to the last
/// chunk, and from chunk 0 on. The second range is empty unless they go around the end.
std::array<Range, 2> arc_of(std::span<const Range> chunks, int first, int count);

/// An edge of a binomial tree. It leads to `peer`; below it are the ranks of the chunks `first`,
/// `first` + 1, ..., `count` of them, where chunk i belongs to the i-th rank after the root.
struct TreeEdge {
  int peer;
  int first;
  int count;
  bool operator==(const TreeEdge&) const = default;
};

/// A rank's edges; a root has no parent. The children are in descending order of their subtrees, so
/// that a rank first serves the child that has most to pass on.
struct Tree {
  std::optional<TreeEdge> parent;
  std::vector<TreeEdge> children;
};

/// The tree of `root` has ceil(log2(size)) levels, and every edge spans a distance of Bruck's
/// steps.
Tree binomial_tree(int rank, int size, int root);

}  // namespace torch_ring
