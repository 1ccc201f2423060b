// SPDX-License-Identifier: Apache-2.0
// Graph: the pairs of ranks that have control connections. No I/O.
#pragma once

#include <chrono>
#include <deque>
#include <utility>
#include <vector>

#include "core/at.h"
#include "core/clock.h"

namespace torch_ring {

/// A Chord ring of the ranks, ordered by (host, rank). A rank's neighbours are the present ones
/// among those at distances 1, 2, 4, ... size/2 in both directions, and the next present rank in
/// each direction: 2 floor(log2(size)) + 2 at most. The relation is symmetric, and connects all
/// present ranks, since the next ones form a ring.
///
/// Thread: any. Cost: O(log size), and a step for each absent rank beside this one.
class Graph {
 public:
  explicit Graph(const std::vector<int>& host_of);

  /// The neighbours of `rank`, in ascending order. `present`: by rank; the element of `rank` itself
  /// is not read.
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

/// The ranks to which a rank should have control connections now. The next present rank replaces a
/// lost one at once. A departed rank keeps its place for kSettle: usually all ranks leave together,
/// and need no new connections.
///
/// Thread: one at a time.
class Neighbourhood {
 public:
  static constexpr std::chrono::milliseconds kSettle{200};

  Neighbourhood(int rank, const std::vector<int>& host_of);

  void lose(int rank);
  void depart(int rank, Clock::time_point now);
  /// Gives up a place at once.
  void vacate(int rank) { at(present_, rank) = false; }
  /// Gives up the places of ranks that departed kSettle ago.
  void settle(Clock::time_point now);
  /// The time of the next change by settle(); Clock::time_point::max() if there is none.
  Clock::time_point next_change() const;

  /// Includes departed ranks while they keep their places.
  std::vector<int> neighbours() const { return graph_.neighbours(rank_, present_); }

  /// Whether there are ranks between this one and `peer`, its next one, and all have left in peace:
  /// then `peer` may have left with them, and no rank remained to pass the news on.
  bool behind_departed(int peer) const;

 private:
  const int rank_;
  const Graph graph_;
  std::vector<bool> present_;
  std::vector<bool> lost_;
  std::deque<std::pair<Clock::time_point, int>> leaving_;
};

}  // namespace torch_ring
