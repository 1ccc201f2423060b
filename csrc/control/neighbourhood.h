// Neighbourhood: to whom a rank should have control connections now. No I/O.
#pragma once

#include <chrono>
#include <deque>
#include <utility>
#include <vector>

#include "control/graph.h"
#include "core/at.h"
#include "core/clock.h"

namespace torch_ring {

/// A lost rank is replaced by the next present one at once. A departed rank keeps its place for
/// kSettle: usually all ranks leave together, and need no new connections for that.
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
  /// When settle() has something to do; Clock::time_point::max() if never.
  Clock::time_point next_change() const;

  /// Departed ranks among them while they keep their places.
  std::vector<int> neighbours() const { return graph_.neighbours(rank_, present_); }

  /// Whether all ranks between this one and `peer`, its next one, have left in peace, and there are
  /// any: then it may be that `peer` has left with them, and nobody remained to pass it on.
  bool behind_departed(int peer) const;

 private:
  const int rank_;
  const Graph graph_;
  std::vector<bool> present_;
  std::vector<bool> lost_;
  std::deque<std::pair<Clock::time_point, int>> leaving_;
};

}  // namespace torch_ring
