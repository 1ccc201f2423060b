// News: what a rank knows of the others, and which message is new to it. No I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "control/message.h"
#include "control/waits.h"

namespace torch_ring {

/// A flood: each rank passes on, once, what it hears first, to all neighbours but the one that it
/// has it from, and tells a new neighbour all that it knows. So every rank hears all, however many
/// messengers die on the way; n ranks with d neighbours each need at most n (d - 1) + 1 messages.
/// Connections keep the order, so the flood keeps causes before effects: what a rank told before
/// its departure is known wherever its departure is known.
///
/// Questions and answers are numbered, and only the next one is new. A rank that connects too late
/// to hear one never does.
///
/// A set has ended when all its members have left it. Nothing is kept of it then but its number, so
/// that what other neighbours pass on later is no news.
///
/// A rank has one fate, lost or departed; the first word about it counts.
///
/// Thread: one at a time.
class News {
 public:
  explicit News(int size) : fates_(static_cast<std::size_t>(size), Fate::kAlive) {}

  /// Takes note of a message. Returns whether it is new: to be told and passed on.
  bool learn(const Message& message);

  /// Takes a rank for departed until there is word about it; others are not told.
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
  /// Whether all members have left the set. Of those that ended long ago it is forgotten.
  bool has_ended(std::uint64_t set) const { return ended_.contains(set); }
  /// Whether some members have left the set, and others not.
  bool is_left_by_some(std::uint64_t set) const { return left_.contains(set); }

  static constexpr std::size_t kEnded = 16'384;  // sets: far more than can end while news travel

  const Waits& waits() const { return waits_; }

  /// What a new neighbour must be told: all that was new, in order, and the waits that last.
  std::vector<Message> known() const;

 private:
  void end(std::uint64_t set);

  enum class Fate : std::uint8_t { kAlive, kPresumedDeparted, kDeparted, kLost };

  std::vector<Fate> fates_;                         // by rank
  std::set<std::pair<std::uint64_t, int>> failed_;  // (set, rank)
  std::map<std::uint64_t, std::set<int>> left_;     // by set, ranks
  std::set<std::uint64_t> ended_;                   // the last kEnded sets
  std::deque<std::uint64_t> ended_in_order_;        // the same
  Waits waits_;
  std::map<int, std::uint64_t> asked_;                     // rank -> its last question
  std::map<std::pair<int, int>, std::uint64_t> answered_;  // (rank, to whom) -> likewise
  std::vector<Message> known_;                             // without waits, questions and answers
};

}  // namespace torch_ring
