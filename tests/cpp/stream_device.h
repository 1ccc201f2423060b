// SPDX-License-Identifier: Apache-2.0
// StreamDevice: a device on NCCL's double, with host memory whose copies run on the double's
// streams.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "doubles/nccl_streams.h"
#include "engine/device.h"
#include "nccl/nccl_communicator.h"
#include "nccl/rendezvous.h"

namespace torch_ring::test {

class StreamDevice final : public Device, public Buffers {
 public:
  StreamDevice(Communicator& host, const Abort& abort, const nccl::Rendezvous& rendezvous,
               std::chrono::milliseconds timeout, int gpu)
      : api_(rendezvous.api), timeout_(timeout), stream_(gpu), communicator_(on_gpu(gpu, [&] {
          return std::make_unique<nccl::NcclCommunicator>(
              api_, rendezvous.id, host.rank(), host.size(), abort, timeout, device_of(stream_));
        })) {}

  Communicator& communicator() override { return *communicator_; }
  Buffers& buffers() override { return *this; }
  void use(const std::function<void()>& enqueue) override {
    on_gpu(stream_.gpu, enqueue);
    if (done_ == enqueued_++) since_ = Clock::now();
    stream_.enqueue([this] { ++done_; });
  }
  bool busy() override {
    communicator_->check();
    const int done = done_;
    if (std::exchange(seen_, done) != done) since_ = Clock::now();
    const bool is_busy = done < enqueued_;
    if (is_busy && Clock::now() - since_ > timeout_) {
      throw Error(ErrorKind::kTimeout, "another rank's device is late");
    }
    return is_busy;
  }
  void abort() noexcept override { communicator_->abort(); }

  // Memory lives as long as the stream, which may use it.
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    return memory_.emplace_back(std::make_shared<std::byte[]>(bytes));
  }
  void* fusion_buffer(std::size_t bytes) override { return allocate(bytes).get(); }
  void copy(std::span<const Copy> copies, DType dtype) override {
    for (const Copy& copy : copies) {
      stream_.enqueue([copy, dtype] {
        if (copy.count > 0) std::memcpy(copy.to, copy.from, copy.count * size_of(dtype));
      });
    }
  }
  void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) override {
    stream_.enqueue([=] { torch_ring::fill_identity(data, count, dtype, op); });
  }

  const Stream& stream() const { return stream_; }

 private:
  const nccl::Api api_;
  const std::chrono::milliseconds timeout_;
  std::vector<std::shared_ptr<void>> memory_;
  int enqueued_ = 0;
  int seen_ = 0;             // of done_
  Clock::time_point since_;  // of the last progress
  std::atomic<int> done_{0};
  Stream stream_;
  std::unique_ptr<nccl::NcclCommunicator> communicator_;
};

}  // namespace torch_ring::test
