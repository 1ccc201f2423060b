// SPDX-License-Identifier: Apache-2.0
// WaitGraph: the ranks that wait, and those that they wait for. LongWait: adds one wait to it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/error.h"

namespace torch_ring {

/// The wait-for graph of a process set. A rank knows the rank that it waits for, but that one may
/// wait for a third. So a rank in a long wait tells all others the ranks that it waits for, and
/// each of them follows the graph to its ends: ranks that others wait for, and that wait for
/// nobody.
///
/// Thread: any. Blocking: no.
class WaitGraph {
 public:
  virtual ~WaitGraph() = default;

  /// How long a rank waits before it tells the others.
  virtual std::chrono::milliseconds patience() const = 0;

  /// Tells the other ranks that this one waits for some of `ranks`; for none if it is empty.
  virtual void tell(std::span<const int> ranks) = 0;

  /// Asks ranks for their present operations. The reader of the process's queries gets the answers.
  virtual void ask(std::span<const int> ranks) = 0;

  /// Whether this rank has heard of any rank that waits.
  virtual bool is_notified() const = 0;

  /// The ends of the graph that `ranks` lead to; `ranks` themselves if it has no end there.
  virtual std::vector<int> ends(std::span<const int> ranks) const = 0;

  /// One of `ranks` that has departed from the world, so that its heartbeats have ended.
  virtual std::optional<int> departed(std::span<const int> ranks) const = 0;

  /// How long a rank waits for the last data of a departed one: nothing else would end that wait if
  /// its host were cut off now.
  virtual std::chrono::milliseconds patience_with_departed() const = 0;

  /// "rank 2 (10.0.0.7, pid 4711)"
  virtual const std::string& label(int rank) const = 0;
};

/// A wait, which its rank announces to the others if it lasts. After the first announcement all
/// other waiting ranks announce their waits at once, so that the graph is complete when a rank
/// reads it. A rank announces its wait again when it waits for other ranks than it has announced: a
/// rank that has arrived may wait for this one. A wait that ends by an exception has failed.
/// Thread: one at a time. Blocking: no.
class LongWait {
 public:
  /// `graph` may be null.
  explicit LongWait(WaitGraph* graph) : graph_(graph) {}
  ~LongWait() {
    if (std::uncaught_exceptions() == exceptions_) end();
  }
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  /// Call while the wait lasts; ranks() are the awaited ones. Errors: Error(kPeerLost) if one of
  /// them has departed, and the wait for it has lasted too long since.
  template <class Ranks>
  void lasts(Clock::time_point now, Ranks&& ranks) {
    if (graph_ == nullptr) return;
    if (since_ == Clock::time_point{}) since_ = now;
    const std::vector<int> awaited = ranks();
    bear_with_departed(now, awaited);
    if (announced_.empty() && now - since_ < graph_->patience() && !graph_->is_notified()) return;
    const auto is_announced = [this](int rank) { return std::ranges::count(announced_, rank) > 0; };
    if (std::ranges::all_of(awaited, is_announced)) return;
    graph_->tell(awaited);
    announced_ = awaited;
  }

  void end() {
    if (!announced_.empty()) graph_->tell({});
    fail();
  }

  /// Ends the wait after an error. The others are not told: the process set has ended, too, and the
  /// ranks whose waits end likewise are about to read the graph for the cause.
  void fail() {
    announced_.clear();
    since_ = departed_since_ = {};
  }

 private:
  void bear_with_departed(Clock::time_point now, std::span<const int> ranks) {
    const std::optional<int> departed = graph_->departed(ranks);
    if (!departed) {
      departed_since_ = {};
      return;
    }
    if (departed_since_ == Clock::time_point{}) departed_since_ = now;
    if (now - departed_since_ < graph_->patience_with_departed()) return;
    throw Error(ErrorKind::kPeerLost, graph_->label(*departed) +
                                          " has left, and its last data has not arrived for " +
                                          in_seconds(graph_->patience_with_departed()) +
                                          " (TORCH_RING_HEARTBEAT_TIMEOUT): its host is cut off");
  }

  WaitGraph* const graph_;
  const int exceptions_ = std::uncaught_exceptions();
  // The times of the first lasts(), and of the first one with a departed rank; the epoch before.
  Clock::time_point since_{};
  Clock::time_point departed_since_{};
  std::vector<int> announced_;
};

}  // namespace torch_ring
