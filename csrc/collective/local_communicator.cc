// SPDX-License-Identifier: Apache-2.0
#include "collective/local_communicator.h"

#include <array>
#include <cstring>

namespace torch_ring {

void LocalCommunicator::allreduce(const void* input, void* output, std::size_t count,
                                  const Reduction& reduction, std::span<const std::int64_t>) {
  const std::array<void*, 1> outputs{output};
  const std::array<const void*, 1> inputs{input};
  reduce(outputs, inputs, count, reduction);
}

void LocalCommunicator::allgather(const void* input, void* output,
                                  std::span<const std::size_t> bytes) {
  if (output != input && bytes[0] > 0) std::memcpy(output, input, bytes[0]);
}

void LocalCommunicator::alltoall(const void* input, void* output,
                                 std::span<const std::size_t> bytes) {
  allgather(input, output, bytes);
}

void LocalCommunicator::reducescatter(const void* input, void* output,
                                      std::span<const std::size_t> counts,
                                      const Reduction& reduction) {
  allreduce(input, output, counts[0], reduction, {});
}

void LocalCommunicator::reduce_to(int, const void* input, void* output, std::size_t count,
                                  const Reduction& reduction) {
  allreduce(input, output, count, reduction, {});
}

void LocalCommunicator::post(const Post& entry) {
  const auto keep = [](std::vector<std::byte>& to, ByteSpan part) {
    to.assign(part.begin(), part.end());
    return ByteSpan(to);
  };
  run_ = {0, 1, keep(entry_[0], entry.common), keep(entry_[1], entry.own)};
  local_ = keep(entry_[2], entry.local);
}

Round LocalCommunicator::round() { return {{&run_, 1}, {&local_, 1}, {&rank_, 1}}; }

void LocalCommunicator::wait_until(Clock::time_point deadline, std::chrono::microseconds) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return woken_; });
  woken_ = false;
}

void LocalCommunicator::wake() {
  const std::scoped_lock lock(mutex_);
  woken_ = true;
  changed_.notify_one();
}

}  // namespace torch_ring
