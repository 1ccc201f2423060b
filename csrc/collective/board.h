// Board: the bulletin board on which the ranks tell one another what they are about to do.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/clock.h"

namespace torch_ring {

/// Rounds of an all-to-all exchange of small entries. In each round every rank posts one entry;
/// the round is complete when all have, and then every rank sees the same entries. A round has no
/// other trigger than a rank's post: a rank that has nothing to say is not disturbed.
///
/// Cost of a round: in shared memory one barrier; over TCP ceil(log2(n)) messages a rank
/// (J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
/// message-passing systems", IEEE TPDS 8(11), 1997).
///
/// Thread: one at a time, but for wake(). Blocking: only wait_until().
/// Errors: the Abort's cause, or Error(kPeerLost).
class Board {
 public:
  virtual ~Board() = default;

  /// The largest entry, in bytes: the same on every rank.
  virtual std::size_t capacity() const = 0;

  /// The largest inline payload: bytes of data that a rank had better put into its entry, as
  /// sending them separately costs a second synchronisation. The same on every rank.
  virtual std::size_t inline_limit() const = 0;

  /// Opens this rank's next round with its entry. The round before must be complete.
  virtual void post(std::span<const std::byte> entry) = 0;

  /// Whether a peer is known to have posted to the round that this rank has not posted to yet.
  virtual bool peer_posted() = 0;

  /// Moves the round on; returns whether every entry of it is here.
  virtual bool complete() = 0;

  /// `rank`'s entry of the completed round; valid until the next post().
  virtual std::span<const std::byte> entry(int rank) const = 0;

  /// The ranks whose entries are known to be missing from the posted round (in a hierarchy, all
  /// ranks of the hosts that are not here yet).
  virtual std::vector<int> missing() const = 0;

  /// Sleeps (after spinning for `spin`, if every rank on this kernel has a core) until the round
  /// that this rank posted to is complete, until a peer has posted to one that it has not, until
  /// wake(), or until `deadline`. May return early.
  virtual void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) = 0;

  /// Ends a wait_until() of this rank. Thread: any.
  virtual void wake() = 0;
};

}  // namespace torch_ring
