// SPDX-License-Identifier: Apache-2.0
// NcclCommunicator: collectives over device memory, with NCCL.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "collective/communicator.h"
#include "core/abort.h"
#include "nccl/api.h"

namespace torch_ring::nccl {

/// Elements on a device in another dtype.
struct Widened {
  void* data = nullptr;
  std::size_t item = 1;  // numbers per element
  DType dtype = DType::kInt32;
};

/// The stream that a communicator's work runs on, and the arithmetic that NCCL lacks. All of it is
/// enqueued on the stream, and follows core/reduce.h.
struct Device {
  Stream stream;
  /// output[i] = input[i] * scaling.prescale * scaling.postscale / scaling.divisor. `output` may be
  /// `input`.
  std::function<void(void* output, const void* input, std::size_t count, DType, const Scaling&)>
      scale = {};
  /// New memory, kept until the stream has run this thread's work of the collective.
  std::function<void*(std::size_t bytes)> allocate = {};
  /// `count` elements of `data`, in new memory, as numbers whose sums can be narrowed.
  std::function<Widened(const void* data, std::size_t count, const Reduction&)> widen = {};
  /// The inverse of widen() after the reduction: output[i] = the reduced number(s) of element i,
  /// times all factors except the prescale, which widen() has applied.
  std::function<void(void* output, const Widened& data, std::size_t count, const Reduction&)>
      narrow = {};
  /// Calls a function while the device is the calling thread's current one. Thread: any.
  std::function<void(const std::function<void()>&)> use = {};
  std::function<void(const std::string&)> log = {};  // takes a warning
};

/// Whether the factors of a reduction multiply its inputs, and not its result: those of a Sum of
/// float16 that make it smaller, such as an Average's divisor. NCCL adds in float16, so the sum of
/// the inputs themselves could overflow where the result does not. Pure.
bool scales_inputs(const Reduction& reduction);

/// Whether NCCL itself divides by the number of ranks: it multiplies each input by 1/size, rounded
/// to the dtype (ncclAvg). For float32, float64 and their pairs, where that is exact: then the bits
/// are those of a sum that is divided. Pure.
bool averages(const Reduction& reduction, int size);

/// All calls enqueue work on the device's stream and return; results are there when the stream has
/// run it. Buffers are device memory that lives until then.
///
/// Thread: one at a time; no other thread is inside NCCL, except in abort(). Blocking: until NCCL
/// has accepted the call, bounded by the timeout; the constructor until all ranks construct theirs;
/// abort() for some seconds, as does the end after an error.
/// Errors: as Communicator's.
class NcclCommunicator final : public Communicator {
 public:
  /// `timeout` bounds each wait.
  NcclCommunicator(const Api& api, const UniqueId& id, int rank, int size, const Abort& abort,
                   std::chrono::milliseconds timeout, Device device);
  ~NcclCommunicator() override { close(); }
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
  void reduce_to(int root, const void* input, void* output, std::size_t count,
                 const Reduction& reduction) override;

  /// Does nothing: a stream keeps its own order, and the board's rounds are the ranks' barrier.
  void barrier() override {}

  /// Throws the asynchronous error of the device or of another rank, if there is one.
  void check();

  /// Aborts the work on the stream that waits for other ranks. No call may follow. Another thread
  /// may be inside a call, because that call may wait for this work.
  void abort() noexcept;

  /// Ends as the destructor does. If nothing has failed, all work must have run; then NCCL ends the
  /// communicator aside, when the other ranks of the host have ended theirs, and no thread waits
  /// for that, nor does the exit of the process. Otherwise as abort(). Returns whether NCCL has
  /// released the stream and the buffers. If not, it hangs, and its thread has been left behind,
  /// with a warning.
  bool close() noexcept;

 private:
  class Group;  // calls that NCCL starts together

  void wait(Result result, const char* call);
  [[noreturn]] void fail(Result result, const char* call);
  const void* scaled(const void* input, std::size_t count, const Reduction& reduction,
                     void* output);
  std::function<void()> on_device(std::function<void()> call) const;
  void finish(void* data, std::size_t count, const Reduction& reduction);
  Widened reduce_widened(const void* input, std::size_t count, const Reduction& reduction);

  const Api& api_;
  const int rank_;
  const int size_;
  const Abort& abort_;
  const std::chrono::milliseconds timeout_;
  const Device device_;
  std::atomic<Comm> comm_{nullptr};  // null: ended. It orders nothing: threads exchange it.
  std::atomic<bool> failed_{false};
  bool left_behind_ = false;
  int sleeping_launches_ = 0;  // the next ones whose waits do not yield
};

}  // namespace torch_ring::nccl
