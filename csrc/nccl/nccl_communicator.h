// NcclCommunicator: collectives over device memory, by NCCL.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>

#include "collective/communicator.h"
#include "core/abort.h"
#include "nccl/api.h"

namespace torch_ring::nccl {

/// Where a communicator's work runs, and what NCCL leaves to others.
struct Device {
  Stream stream;
  /// Enqueues on the stream: data[i] = data[i] * scaling.postscale / scaling.divisor, computed as
  /// core/reduce.h says. (ncclAvg multiplies by 1/n rounded to the dtype of the data.)
  std::function<void(void* data, std::size_t count, DType, const Scaling&)> scale;
};

/// All calls enqueue on the device's stream and return: results are there when the stream has come
/// so far. Buffers are device memory that lives until then. A reduction's prescale is 1: who has an
/// allocator has applied it.
///
/// Thread: one at a time, which alone is inside NCCL. Blocking: until NCCL has taken the call,
/// bounded by the timeout; the constructor until all ranks have come.
/// Errors: as Communicator's. After one, or abort(), the destructor waits for nothing.
class NcclCommunicator final : public Communicator {
 public:
  /// `timeout`: of each wait.
  NcclCommunicator(const Api& api, const UniqueId& id, int rank, int size, const Abort& abort,
                   std::chrono::milliseconds timeout, Device device);
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void allreduce(const void* input, void* output, std::size_t count, const Reduction& reduction,
                 std::span<const std::int64_t> shared_offsets = {}) override;
  void broadcast(void* data, std::size_t bytes, int root) override;
  void allgather(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                     const Reduction& reduction) override;

  /// Does nothing: a stream keeps its own order, and the board's rounds are the ranks' barrier.
  void barrier() override {}

  /// Throws what has gone wrong since on the device or between the ranks, if anything has.
  void check();

  /// Ends what runs on the stream and waits for other ranks. No call may follow.
  void abort() noexcept;

 private:
  class Group;  // calls that NCCL takes together

  void wait(Result result, const char* call);
  [[noreturn]] void fail(Result result, const char* call);
  void finish(void* data, std::size_t count, const Reduction& reduction);

  const Api& api_;
  const int rank_;
  const int size_;
  const Abort& abort_;
  const std::chrono::milliseconds timeout_;
  const Device device_;
  Comm comm_ = nullptr;
  bool failed_ = false;
};

}  // namespace torch_ring::nccl
