// Waits: who waits for whom, as the ranks have told. No I/O.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "control/message.h"

namespace torch_ring {

/// The wait-for graphs of all process sets (transport/wait_graph.h). Ranks are those of the world.
///
/// Each rank numbers its messages, so that one which comes a second time, or after a later one of
/// the same rank, changes nothing. Cost among n ranks that wait for one: n floods of one message,
/// and n more when it comes.
///
/// Thread: one at a time.
class Waits {
 public:
  /// Takes note of a message. Returns whether it is new.
  bool learn(const Message& message);

  /// Lets go of what is told of this set, which has ended.
  void forget(std::uint64_t set);

  /// Whether any rank waits in this set.
  bool any(std::uint64_t set) const;

  /// The ends of the set's graph that `ranks` lead to; `ranks` themselves if it has none there.
  std::vector<int> ends(std::uint64_t set, std::span<const int> ranks) const;

  /// The last message of each rank and set: what a new neighbour must be told.
  std::vector<Message> known() const;

 private:
  // By set and rank: its last message. One without ranks says that the wait has ended.
  std::map<std::pair<std::uint64_t, int>, Message> told_;
};

}  // namespace torch_ring
