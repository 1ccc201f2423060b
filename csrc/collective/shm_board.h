// SPDX-License-Identifier: Apache-2.0
// ShmBoard: the bulletin board of one host, in shared memory.
#pragma once

#include <atomic>
#include <vector>

#include "collective/board.h"
#include "collective/host.h"

namespace torch_ring {

/// Round r lies in entry slot r % 2 of every rank's memory. A rank posts round r + 2 only after
/// round r + 1 is complete: every rank has posted to r + 1, and so has read round r. Two slots are
/// enough, with no second barrier. Cost of a round: one barrier.
///
///   slot:  u32 bytes of common | u32 of own | u32 of local | u32 us waited | u32 us at most | u32
///   0 |
///          the parts, each padded to 8
///
/// As the board of one of several hosts, it returns entries by index within the host.
class ShmBoard : public Board {
 public:
  explicit ShmBoard(Host& host);

  std::size_t capacity() const override { return Slot::kEntryBytes; }
  std::size_t inline_limit() const override { return 4u << 10; }
  void post(const Post& entry) override;
  bool peer_posted() override;
  bool complete() override;
  Round round() override;
  std::vector<int> missing() const override;
  void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) override;
  void wake() override;

  std::uint64_t round_number() const { return round_; }

  /// Of the round before the completed one. Valid after round().
  const LeastWait& least_wait() const { return least_wait_; }

 private:
  Post entry(int index) const;

  Host& host_;
  std::vector<int> ranks_;        // of this host
  std::vector<Run> runs_;         // of the completed round
  std::vector<ByteSpan> locals_;  // of the completed round, by index
  std::uint64_t round_ = 0;
  bool open_ = false;  // posted to, and not yet seen to be complete
  LeastWait least_wait_;
  std::atomic<bool> woken_{false};
};

}  // namespace torch_ring
