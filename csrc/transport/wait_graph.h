// WaitGraph: who waits for whom. LongWait: tells it of one wait.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"

namespace torch_ring {

/// The wait-for graph of a process set. A rank knows for whom it waits itself, but that rank may
/// wait for another one. So a rank that waits long tells all others for whom, and each of them
/// follows the graph to its ends: to the ranks that are waited for, and wait for nobody.
///
/// Thread: any. Blocking: no.
class WaitGraph {
 public:
  virtual ~WaitGraph() = default;

  /// How long a rank waits before it tells.
  virtual std::chrono::milliseconds patience() const = 0;

  /// Tells the other ranks that this one waits for some of `ranks`; for nobody, if that is empty.
  virtual void tell(std::span<const int> ranks) = 0;

  /// Whether any rank waits, as far as it is told.
  virtual bool is_told() const = 0;

  /// The ends of the graph that `ranks` lead to; `ranks` themselves if it has no end there.
  virtual std::vector<int> ends(std::span<const int> ranks) const = 0;

  /// "rank 2 (10.0.0.7, pid 4711)"
  virtual const std::string& label(int rank) const = 0;
};

/// A wait that its rank tells the others of, if it lasts. When one rank has told, all others that
/// wait follow at once, so that the graph is complete when somebody reads it.
/// Thread: one at a time. Blocking: no.
class LongWait {
 public:
  /// `graph` may be null.
  explicit LongWait(WaitGraph* graph) : graph_(graph) {}
  ~LongWait() { end(); }
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  /// It still lasts at `now`; ranks() are those that are waited for.
  template <class Ranks>
  void lasts(Clock::time_point now, Ranks&& ranks) {
    if (graph_ == nullptr || told_) return;
    if (since_ == Clock::time_point{}) since_ = now;
    if (now - since_ < graph_->patience() && !graph_->is_told()) return;
    graph_->tell(ranks());
    told_ = true;
  }

  void end() {
    if (told_) graph_->tell({});
    told_ = false;
    since_ = {};
  }

 private:
  WaitGraph* const graph_;
  Clock::time_point since_{};  // the first lasts(); the clock's beginning before it
  bool told_ = false;
};

}  // namespace torch_ring
