// SPDX-License-Identifier: Apache-2.0
// Board: the bulletin board on which ranks announce their requests to one another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/clock.h"

namespace torch_ring {

using ByteSpan = std::span<const std::byte>;

/// The rank with the shortest wait in a round, which is the last one to post to it, since the
/// others waited for it; and the longest wait of the others. Needs no common clock.
struct LeastWait {
  static constexpr std::uint32_t kNone = 0xffffffff;

  std::uint32_t us = kNone;
  std::uint32_t rank = 0;
  std::uint32_t most_us = 0;

  void include(const LeastWait& other) {
    most_us = std::max(most_us, other.most_us);
    if (other.us >= us) return;
    us = other.us;
    rank = other.rank;
  }
  /// The rank, or -1.
  int last() const { return us == kNone ? -1 : static_cast<int>(rank); }
};

/// A rank's entry of a round.
struct Post {
  ByteSpan common;  // usually equal on all ranks, and then sent once for all of them
  ByteSpan own;     // differs from rank to rank; usually empty
  ByteSpan local;   // only the ranks of this rank's host see it
  // This rank's wait in the round before. LeastWait::kNone if its entry there was empty: such an
  // answer follows the last request, and its rank waits for no other.
  std::uint32_t waited_us = LeastWait::kNone;
  // The longest notable wait (Lateness) of this rank for the operations agreed on in that round; 0:
  // none.
  std::uint32_t most_us = 0;
};

/// Consecutive ranks that posted equal entries.
struct Run {
  int first = 0;
  int count = 0;
  ByteSpan common;
  ByteSpan own;
};

/// The entries of a complete round.
struct Round {
  std::span<const Run> runs;         // of all ranks, in their order; neighbours may be equal
  std::span<const ByteSpan> locals;  // the local parts, by index within this rank's host
  std::span<const int> host_ranks;   // the ranks of this host, ascending: the owners of `locals`
  int last_of_previous = -1;         // the rank that posted last to the round before; -1: unknown
  std::uint32_t most_us = 0;         // the longest Post::most_us of a rank
};

/// An all-to-all exchange of small entries, in rounds. In each round every rank posts one entry.
/// When all have posted, the round is complete and every rank sees the same entries. Only a post
/// starts a round, so a rank with nothing to post is not disturbed.
///
/// Cost of a round: in shared memory one barrier; over TCP ceil(log2(n)) messages a rank
/// (J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
/// message-passing systems", IEEE TPDS 8(11), 1997). Their size grows with the number of runs, and
/// not with n: while all ranks post the same, each is as long as one entry.
///
/// Thread: one at a time, except wake(). Blocking: only wait_until().
/// Errors: the Abort's cause, or Error(kPeerLost).
class Board {
 public:
  virtual ~Board() = default;

  /// The longest entry, in bytes: its parts, each padded to a multiple of 8. The same on every
  /// rank.
  virtual std::size_t capacity() const = 0;

  /// The longest entry that fits even if every rank posts a different one, at most capacity().
  /// Longer ones fit as long as enough ranks post the same; if they do not, the round fails on
  /// every rank with Error(kInternal). The same on every rank.
  virtual std::size_t safe_capacity() const { return capacity(); }

  /// The largest inline payload, in bytes: data up to this size belongs in the entry, because
  /// sending it separately costs a second synchronisation. The same on every rank.
  virtual std::size_t inline_limit() const = 0;

  /// Starts this rank's next round with its entry. The previous round must be complete.
  virtual void post(const Post& entry) = 0;

  /// Whether a peer is known to have posted to the round that this rank has not posted to yet.
  virtual bool peer_posted() = 0;

  /// Makes progress on the round; returns whether all its entries have arrived.
  virtual bool complete() = 0;

  /// The entries of the completed round; valid until the next post(). Every span in them begins at
  /// a multiple of 8.
  virtual Round round() = 0;

  /// The ranks whose entries are missing from the posted round. Between hosts they include ranks
  /// whose entries arrive behind missing ones: the WaitGraph tells them apart.
  virtual std::vector<int> missing() const = 0;

  /// Waits until the round that this rank posted to is complete, until a peer has posted to one
  /// that this rank has not, until wake(), or until `deadline`. May return early. Spins for `spin`
  /// first, if every rank on this kernel has a core; then sleeps.
  virtual void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) = 0;

  /// Ends a wait_until() of this rank. Thread: any.
  virtual void wake() = 0;
};

}  // namespace torch_ring
