// SPDX-License-Identifier: Apache-2.0
// HierarchicalBoard: a Board of several hosts, with shared memory inside them and TCP between their
// leaders.
#pragma once

#include <atomic>
#include <vector>

#include "collective/host.h"
#include "collective/shm_board.h"
#include "collective/tcp_board.h"
#include "core/at.h"

namespace torch_ring {

/// In a round the ranks of a host post in shared memory. When all have posted, their leader (host
/// index 0) posts their entries as runs to the other leaders. It writes the runs of all ranks to
/// its memory, where its host's ranks read them. World slot r % 2 is free for round r + 2 for the
/// reason given in shm_board.h. The world slot has runs (write_slot()), in the order of hosts and
/// their ranks. While the ranks post the same, they are as long as one entry, regardless of the
/// number of ranks.
class HierarchicalBoard : public Board {
 public:
  /// `ranks_of_host`: by host; `leaders` is null on ranks that do not lead. All outlive the board.
  HierarchicalBoard(Host& host, const std::vector<std::vector<int>>& ranks_of_host,
                    TcpBoard* leaders);

  std::size_t capacity() const override { return local_.capacity(); }
  std::size_t safe_capacity() const override;
  std::size_t inline_limit() const override { return TcpBoard::kInlineLimit; }
  void post(const Post& entry) override;
  bool peer_posted() override;
  bool complete() override;
  Round round() override;
  std::vector<int> missing() const override;
  void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) override;
  void wake() override;

 private:
  void gather();
  void publish();
  void read();

  Host& host_;
  const std::vector<std::vector<int>> ranks_of_host_;
  const int size_;
  TcpBoard* const leaders_;
  ShmBoard local_;
  std::vector<int> order_;  // the ranks in the order of runs; empty if that is their own order
  bool open_ = false;       // posted to and not complete
  bool gathered_ = false;   // the leader has posted its host's entries
  Runs runs_;               // in the leader's world slot
  RoundEntries entries_;
  std::atomic<bool> woken_{false};
};

}  // namespace torch_ring
