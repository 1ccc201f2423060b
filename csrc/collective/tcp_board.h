// SPDX-License-Identifier: Apache-2.0
// TcpBoard: a Board over connections: Bruck's allgather, which makes progress without blocking.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "collective/board.h"
#include "collective/frames.h"
#include "core/at.h"
#include "transport/connection.h"

namespace torch_ring {

/// A step is one frame (frames.h) in each direction. No rank is the source of two steps, so a
/// connection has at most one frame a round each way, in the order of the rounds, regardless of the
/// order in which ranks post.
///
/// Data travels on the same connections. Therefore every rank runs the collectives of a round
/// before its next post(), and before peer_posted(), which would mistake their bytes for a frame.
/// The board never reads beyond the due frame.
///
/// A board of leaders has a member for each host, and is used through post_runs() and runs().
class TcpBoard : public Board {
 public:
  static constexpr std::size_t kEntryBytes = 64u << 10;
  static constexpr std::size_t kInlineLimit = 16u << 10;

  /// `connections[r]` leads to member r, null at `rank` itself; they and `waiter` outlive the
  /// board. `ranks_of_member`: the number of ranks whose entries each member posts; empty: one.
  /// `capacity`: of an entry.
  TcpBoard(int rank, std::vector<Connection*> connections, const Waiter& waiter,
           std::vector<std::uint32_t> ranks_of_member = {}, std::size_t capacity = kEntryBytes);

  std::size_t capacity() const override { return capacity_; }
  std::size_t inline_limit() const override { return kInlineLimit; }
  void post(const Post& entry) override;
  bool peer_posted() override;
  bool complete() override;
  Round round() override;
  std::vector<int> missing() const override;
  void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) override;
  void wake() override;

  /// post() of the entries of all ranks of this member.
  void post_runs(const Runs& entries, const LeastWait& least_wait);

  /// Of the round before the completed one.
  const LeastWait& least_wait() const { return frames_.least_wait(); }

  /// The entries of the completed round, in the order of members; valid until the next post.
  const Runs& runs() const { return frames_.runs(); }

  /// The descriptors that a wait for this board polls. They stay valid, and complete() and post()
  /// keep them up to date, also while a Waiter holds them.
  std::span<const pollfd> fds() {
    update_fds();  // collectives on the connections change the sockets in use
    return fds_;
  }

 private:
  bool flush();
  bool receive_frame();
  void update_fds();
  Connection& connection(int rank) const { return *at(connections_, rank); }
  const std::vector<BruckStep>& steps() const { return frames_.steps(); }

  const int rank_;
  const std::vector<Connection*> connections_;
  const Waiter& waiter_;
  const std::size_t capacity_;

  BruckFrames frames_;
  std::vector<std::size_t> sent_;  // bytes of each step's frame
  bool open_ = false;              // posted to and not complete
  RoundEntries entries_;
  std::vector<std::byte> local_;  // the local part of this rank's entry
  ByteSpan local_part_;
  std::vector<pollfd> fds_;  // by step, and one more; fd -1 where there is nothing to wait for
  std::atomic<bool> woken_{false};
};

}  // namespace torch_ring
