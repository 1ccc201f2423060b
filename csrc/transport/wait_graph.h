// WaitGraph: who waits for whom. LongWait: tells it of one wait.
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

  /// Asks ranks what they do. The answers come elsewhere, as those of the whole process.
  virtual void ask(std::span<const int> ranks) = 0;

  /// Whether any rank waits, as far as it has been notified.
  virtual bool is_notified() const = 0;

  /// The ends of the graph that `ranks` lead to; `ranks` themselves if it has no end there.
  virtual std::vector<int> ends(std::span<const int> ranks) const = 0;

  /// One of `ranks` that has departed from the world, so that its heartbeats have ended.
  virtual std::optional<int> departed(std::span<const int> ranks) const = 0;

  /// How long a rank waits for what a departed one has sent last: nothing else would end that wait
  /// if its host were cut off now.
  virtual std::chrono::milliseconds patience_with_departed() const = 0;

  /// "rank 2 (10.0.0.7, pid 4711)"
  virtual const std::string& label(int rank) const = 0;
};

/// A wait that its rank tells the others of, if it lasts. When one rank has told, all others that
/// wait follow at once, so that the graph is complete when somebody reads it. It tells again when
/// it waits for others than it has told: a rank that has come may wait for this one. One that ends
/// by an exception has failed. Thread: one at a time. Blocking: no.
class LongWait {
 public:
  /// `graph` may be null.
  explicit LongWait(WaitGraph* graph) : graph_(graph) {}
  ~LongWait() {
    if (std::uncaught_exceptions() == exceptions_) end();
  }
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  /// It still lasts at `now`; ranks() are those that are waited for. Errors: Error(kPeerLost) if
  /// one of them has departed, and has been waited for since for too long.
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

  /// It has ended by an error. The others are not told: the process set has ended, too, and they,
  /// whose waits end likewise, are about to look in the graph for the cause.
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
                                          " has left, and what it has sent last has not come for " +
                                          in_seconds(graph_->patience_with_departed()) +
                                          " (TORCH_RING_HEARTBEAT_TIMEOUT): its host is cut off");
  }

  WaitGraph* const graph_;
  const int exceptions_ = std::uncaught_exceptions();
  // The first lasts(), and the first one with a departed rank; the clock's beginning before them.
  Clock::time_point since_{};
  Clock::time_point departed_since_{};
  std::vector<int> announced_;
};

}  // namespace torch_ring
