// Graph: which ranks have control connections with one another. No I/O.
#pragma once

#include <vector>

namespace torch_ring {

/// A Chord ring of the ranks, ordered by (host, rank). A rank's neighbours are those at distances
/// 1, 2, 4, ... size/2 in both directions, as far as they are present, and the next present rank in
/// each direction: 2 floor(log2(size)) + 2 at most. The relation is symmetric, and connects all
/// present ranks, since the next ones form a ring.
///
/// Thread: any. Cost: O(log size), and a step for each absent rank beside this one.
class Graph {
 public:
  explicit Graph(const std::vector<int>& host_of);

  /// The neighbours of `rank`, in ascending order. `present`: by rank; that of `rank` is not read.
  std::vector<int> neighbours(int rank, const std::vector<bool>& present) const;

  /// The absent ranks between `rank` and the next present one upwards (`step` 1) or downwards (-1);
  /// `next` is that one, or `rank` itself if no other is present.
  struct Gap {
    std::vector<int> absent;
    int next;
  };
  Gap gap(int rank, int step, const std::vector<bool>& present) const;

 private:
  int at_distance(int rank, int distance) const;

  std::vector<int> ring_;      // position -> rank
  std::vector<int> position_;  // rank -> position
};

}  // namespace torch_ring
