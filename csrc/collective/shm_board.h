// ShmBoard: the bulletin board of one host, in shared memory.
#pragma once

#include <atomic>

#include "collective/board.h"
#include "collective/host.h"

namespace torch_ring {

/// Round r lies in entry slot r % 2 of every rank's memory. A rank posts round r + 2 only after
/// round r + 1 is complete: every rank has posted r + 1, and so has read round r. Two slots are
/// enough, with no second barrier. Cost of a round: one barrier.
class ShmBoard : public Board {
 public:
  explicit ShmBoard(Host& host, std::size_t capacity = Slot::kEntryBytes)
      : host_(host), capacity_(capacity) {}

  std::size_t capacity() const override { return capacity_; }
  std::size_t inline_limit() const override { return 4u << 10; }
  void post(std::span<const std::byte> entry) override;
  bool peer_posted() override;
  bool complete() override;
  std::span<const std::byte> entry(int index) const override;
  std::vector<int> missing() const override;
  void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) override;
  void wake() override;

  std::uint64_t round() const { return round_; }

 private:
  Host& host_;
  const std::size_t capacity_;
  std::uint64_t round_ = 0;
  bool open_ = false;  // posted to, and not yet seen complete
  std::atomic<bool> woken_{false};
};

}  // namespace torch_ring
