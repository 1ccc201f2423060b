// SPDX-License-Identifier: Apache-2.0
// LocalCommunicator: the communicator of a world of one rank.
#pragma once

#include <array>
#include <condition_variable>
#include <mutex>

#include "collective/communicator.h"

namespace torch_ring {

/// Every round is complete when it is posted; every reduction has one input.
class LocalCommunicator : public HostCommunicator, private Board {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Board& board() override { return *this; }
  void allreduce(const void* input, void* output, std::size_t count, const Reduction& reduction,
                 std::span<const std::int64_t> shared_offsets) override;
  void broadcast(void*, std::size_t, int) override {}
  void allgather(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                     const Reduction& reduction) override;
  void reduce_to(int root, const void* input, void* output, std::size_t count,
                 const Reduction& reduction) override;
  void barrier() override {}

 private:
  std::size_t capacity() const override { return 64u << 10; }
  std::size_t inline_limit() const override { return 4u << 10; }
  void post(const Post& entry) override;
  bool peer_posted() override { return false; }
  bool complete() override { return true; }
  Round round() override;
  std::vector<int> missing() const override { return {}; }
  void wait_until(Clock::time_point deadline, std::chrono::microseconds spin) override;
  void wake() override;

  std::array<std::vector<std::byte>, 3> entry_;  // common, own, local
  Run run_;
  ByteSpan local_;
  const int rank_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

}  // namespace torch_ring
