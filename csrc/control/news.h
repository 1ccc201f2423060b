// SPDX-License-Identifier: Apache-2.0
// News: a rank's knowledge of the others, which tells new messages from known ones. No I/O.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "control/message.h"
#include "core/error.h"

namespace torch_ring {

/// A set of numbers, most of which follow one another.
/// Memory: O(intervals) of consecutive numbers. Cost: O(log intervals).
class IntervalSet {
 public:
  void insert(std::uint64_t number) {
    if (contains(number)) return;
    const auto after = intervals_.upper_bound(number);
    const bool joins_after = after != intervals_.end() && after->first == number + 1;
    const std::uint64_t last = joins_after ? after->second : number;
    const bool joins_before =
        after != intervals_.begin() && number != 0 && std::prev(after)->second == number - 1;
    if (joins_before) {
      std::prev(after)->second = last;
    } else {
      intervals_.emplace_hint(after, number, last);
    }
    if (joins_after) intervals_.erase(after);
  }

  bool contains(std::uint64_t number) const {
    const auto after = intervals_.upper_bound(number);
    return after != intervals_.begin() && number <= std::prev(after)->second;
  }

  /// The number of intervals.
  std::size_t intervals() const { return intervals_.size(); }

 private:
  std::map<std::uint64_t, std::uint64_t> intervals_;  // first -> last
};

/// A set's number with one of these bits names its messages (csrc/messages): those from lower to
/// higher ranks of the world, and those from higher to lower ones. The sets themselves are numbered
/// from 0 on.
inline constexpr std::uint64_t kMessagesUp = std::uint64_t{1} << 63;
inline constexpr std::uint64_t kMessagesDown = std::uint64_t{1} << 62;

constexpr std::uint64_t set_of(std::uint64_t number) {
  return number & ~(kMessagesUp | kMessagesDown);
}

/// The numbers of all connections of a set.
constexpr std::array<std::uint64_t, 3> numbers_of(std::uint64_t set) {
  return {set, set | kMessagesUp, set | kMessagesDown};
}

/// Whether `rank` connects to `peer`, and not the other way round: the sender of messages does, and
/// otherwise the higher rank.
constexpr bool connects(std::uint64_t number, int rank, int peer) {
  return (number & kMessagesUp) != 0 ? rank < peer : rank > peer;
}

/// Hears of losses, departures and failures among the ranks of a process set. The plane's thread
/// calls it, and ControlPlane::subscribe() for earlier news. It must neither block nor call
/// subscribe() or unsubscribe(). The caller holds no lock that fail(), missing() or
/// SocketSource::take() take, so these may be called under a lock of the observer's.
class ControlObserver {
 public:
  virtual ~ControlObserver() = default;
  /// `rank` of the world has died, or is silent. `how`: "rank 3 (pid 7) died: its ...", or, from
  /// another rank, "rank 1 (pid 5) says that rank 3 (pid 7) died: ...". `rank` may be this rank
  /// itself: the others presume it lost when it was stopped for long. A rank that on_departed()
  /// named may still be lost.
  virtual void on_lost(int rank, const std::string& how) = 0;
  /// `rank` of the world has left the set in peace. `rounds`: the rounds of the set's board that it
  /// had completed, so its data for them is on the way; none if unknown. `why`: its program's
  /// exception, if that has failed. There may be several calls for a rank; the first one with
  /// `rounds` is right.
  virtual void on_departed(int rank, std::optional<std::uint64_t> rounds,
                           const std::string& why) = 0;
  /// `rank` of the world has given up the set.
  virtual void on_failed(int rank, ErrorKind kind, const std::string& why) = 0;
  /// A data connection of the set has been made, or has failed: call SocketSource::take() again.
  virtual void on_connected() = 0;
};

/// The announced waits of all ranks: the wait-for graphs of all process sets
/// (transport/wait_graph.h). Ranks are those of the world.
///
/// Each rank numbers its messages, so that a repeated or overtaken one changes nothing. Cost when n
/// ranks wait for one: n floods of one message, and n more when that rank arrives.
///
/// Thread: one at a time.
class Waits {
 public:
  /// Takes note of a message. Returns whether it is new.
  bool learn(const Message& message);

  /// Forgets the waits of this set, which has ended.
  void forget(std::uint64_t set);

  /// Whether any rank waits in this set.
  bool any(std::uint64_t set) const;

  /// The ends of the set's graph that `ranks` lead to; `ranks` themselves if it has none there.
  std::vector<int> ends(std::uint64_t set, std::span<const int> ranks) const;

  /// The last message of each rank and set, for a new neighbour.
  std::vector<Message> known() const;

 private:
  // By set and rank: its last message. Without ranks, it ends a wait.
  std::map<std::pair<std::uint64_t, int>, Message> last_;
};

/// A flood: each rank passes a message on once, when it first hears it, to all neighbours but the
/// sender, and tells a new neighbour all that it knows. So every rank hears all news, even if
/// messengers die on the way; n ranks with d neighbours each need at most n (d - 1) + 1 messages.
/// Connections keep the order, so the flood keeps causes before effects: a rank that knows of a
/// departure knows all earlier messages of the departed rank.
///
/// Questions and answers are numbered, and only a higher number is new. A rank that connects too
/// late misses them.
///
/// A set has ended when all its members have left it. Then only its number is kept, so that later
/// messages about it are not new. Set numbers begin at 0, and those of sets that all members have
/// removed at one point (ControlPlane::unsubscribe) are missing: a gap takes some bytes.
///
/// A rank has one fate, lost or departed; the first news of it counts.
///
/// Thread: one at a time.
class News {
 public:
  explicit News(int size) : fates_(static_cast<std::size_t>(size), Fate::kAlive) {}

  /// Takes note of a message. Returns whether it is new: for the observers, and to be passed on.
  bool learn(const Message& message);

  /// Presumes a rank departed until there is news of it; other ranks are not told.
  void presume_departed(int rank);

  bool alive(int rank) const;
  bool departed(int rank) const;
  /// The place in `ranks` of the first one that has departed.
  std::optional<std::size_t> first_departed(std::span<const int> ranks) const;
  bool lost(int rank) const;
  /// The ranks that are lost.
  std::vector<int> lost() const;
  /// Whether any rank has given the set up.
  bool has_failed(std::uint64_t set) const;
  /// Whether all members have left the set.
  bool has_ended(std::uint64_t set) const { return ended_.contains(set); }

  const Waits& waits() const { return waits_; }

  /// The stop points that the furthest rank had passed when it heard of a stop; none until all
  /// living ranks have told theirs. All ranks find the same number, if none is lost or presumed
  /// departed meanwhile: a departed rank's number is known wherever its departure is.
  std::optional<std::uint64_t> furthest_point() const;
  /// The first kStops with a signal; null if there is none.
  const Message* first_signal() const;
  /// The first kLost of a rank other than `rank`; null if there is none.
  const Message* first_loss_besides(int rank) const;

  /// The messages for a new neighbour: all that were new, in order, and the present waits.
  std::vector<Message> known() const;

 private:
  void end(std::uint64_t set);
  template <class Is>
  const Message* first(Is&& is) const;

  enum class Fate : std::uint8_t { kAlive, kPresumedDeparted, kDeparted, kLost };

  std::vector<Fate> fates_;                         // by rank
  std::set<std::pair<std::uint64_t, int>> failed_;  // (set, rank)
  std::map<std::uint64_t, std::set<int>> left_;     // by set, ranks
  IntervalSet ended_;                               // intervals between live and removed sets
  Waits waits_;
  std::map<int, std::uint64_t> points_;                    // rank -> the stop points that it told
  std::map<int, std::uint64_t> asked_;                     // rank -> its last question
  std::map<std::pair<int, int>, std::uint64_t> answered_;  // (rank, recipient) -> its last answer
  std::vector<Message> known_;                             // without waits, questions and answers
};

}  // namespace torch_ring
