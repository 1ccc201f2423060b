// SPDX-License-Identifier: Apache-2.0
// Gpu: a GPU of the doubles, which may run one operation of NCCL at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

namespace torch_ring::nccl {

/// The operations of all communicators on one GPU, in the order in which they were enqueued. A
/// kernel of NCCL occupies the GPU until the other ranks' kernels run, so the next one may have to
/// wait, on any stream. On a real GPU that depends on its free resources: this is the worst case.
/// Thread: any.
class Gpu {
 public:
  explicit Gpu(int number) : number(number) {}

  /// An operation, from its enqueueing to its end.
  class Operation {
   public:
    explicit Operation(Gpu& gpu) : gpu_(gpu) {
      const std::scoped_lock lock(gpu_.mutex_);
      number_ = gpu_.enqueued_++;
      gpu_.operations_.insert(number_);
    }
    ~Operation() {
      const std::scoped_lock lock(gpu_.mutex_);
      gpu_.operations_.erase(number_);
      gpu_.changed_.notify_all();
    }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    /// Whether all operations enqueued before it have ended; waits for them for `patience` at most.
    bool is_next(std::chrono::microseconds patience) const {
      std::unique_lock lock(gpu_.mutex_);
      return gpu_.changed_.wait_for(lock, patience,
                                    [&] { return *gpu_.operations_.begin() == number_; });
    }

   private:
    Gpu& gpu_;
    std::uint64_t number_;
  };

  /// The GPU of that number in this process.
  static Gpu& of(int number);

  const int number;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t enqueued_ = 0;
  std::set<std::uint64_t> operations_;  // pending ones
};

}  // namespace torch_ring::nccl
