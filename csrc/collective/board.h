// Board: the bulletin board on which ranks announce their requests to one another.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/clock.h"

namespace torch_ring {

/// An all-to-all exchange of small entries, in rounds. In each round every rank posts one entry.
/// When all have posted, the round is complete and every rank sees the same entries. Only a post
/// starts a round, so a rank with nothing to post is not disturbed.
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

  /// The largest inline payload, in bytes: data up to this size belongs into the entry, because to
  /// send it separately costs a second synchronisation. The same on every rank.
  virtual std::size_t inline_limit() const = 0;

  /// Starts this rank's next round with its entry. The previous round must be complete.
  virtual void post(std::span<const std::byte> entry) = 0;

  /// Whether a peer is known to have posted to the round that this rank has not posted to yet.
  virtual bool peer_posted() = 0;

  /// Makes progress on the round; returns whether all its entries have arrived.
  virtual bool complete() = 0;

  /// `rank`'s entry of the completed round; valid until the next post().
  virtual std::span<const std::byte> entry(int rank) const = 0;

  /// The ranks whose entries are missing from the posted round (between hosts: all ranks of the
  /// missing hosts).
  virtual std::vector<int> missing() const = 0;

  /// Waits until the round that this rank posted to is complete, until a peer has posted to one
  /// that this rank has not, until wake(), or until `deadline`. May return early. Spins for `spin`
  /// first, if every rank on this kernel has a core; then sleeps.
  virtual void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) = 0;

  /// Ends a wait_until() of this rank. Thread: any.
  virtual void wake() = 0;
};

}  // namespace torch_ring
