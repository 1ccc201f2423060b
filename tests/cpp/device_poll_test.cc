// SPDX-License-Identifier: Apache-2.0
// The engine's thread polls a device with enqueued work, so that errors there are noticed and
// close() learns that the work has run.
#include <atomic>
#include <cstring>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "core/at.h"
#include "engine_ranks.h"

namespace torch_ring::test::device_poll_test {
namespace {

using std::chrono::milliseconds;

/// A device over host memory. It is busy for a few polls after each use.
class PolledDevice final : public Device, public Buffers {
 public:
  PolledDevice(Communicator& host, std::atomic<int>& polls_left)
      : host_(host), polls_left_(polls_left) {}

  Communicator& communicator() override { return host_; }
  Buffers& buffers() override { return *this; }
  void use(const std::function<void()>& enqueue) override {
    enqueue();
    polls_left_ = 3;
  }
  bool busy() override { return polls_left_ > 0 && --polls_left_ > 0; }
  void abort() noexcept override {}

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    memory_ = std::make_shared<std::vector<std::byte>>(bytes);
    return {memory_, memory_->data()};
  }
  void* fusion_buffer(std::size_t bytes) override { return allocate(bytes).get(); }
  void copy(std::span<const Copy> copies, DType dtype) override {
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.count * size_of(dtype));
  }
  void fill_identity(void*, std::size_t, DType, ReduceOp) override {}

 private:
  Communicator& host_;
  std::atomic<int>& polls_left_;
  std::shared_ptr<std::vector<std::byte>> memory_;
};

/// A blocking allreduce of a tensor on the device.
void allreduce(Rank& rank, const std::string& name) {
  std::vector<float> values(3, 1.0f);
  Request request;
  request.fingerprint.device = 1;
  request.fingerprint.name = name;
  request.fingerprint.shape = {3};
  request.input = request.output = values.data();
  rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
}

TEST(engine_polls_a_device_that_became_idle_and_busy_again_in_one_turn) {
  std::vector<World> worlds = make_worlds({0, 0});
  std::latch both(2);
  run_ranks(2, [&](int rank) {
    std::atomic<int> polls_left{0};
    Rank self(at(worlds, rank), nullptr, patient(),
              [&](std::uint8_t, Communicator& host, const Abort&) -> std::unique_ptr<Device> {
                return std::make_unique<PolledDevice>(host, polls_left);
              });
    allreduce(self, "a");
    // Rank 0 waits for rank 1, and meanwhile finds its device idle.
    if (rank == 1) std::this_thread::sleep_for(milliseconds(500));
    allreduce(self, "b");
    const auto deadline = Clock::now() + milliseconds(10000);
    while (polls_left > 0 && Clock::now() < deadline) std::this_thread::yield();
    const int left = polls_left;
    both.arrive_and_wait();  // because a rank that closes wakes the other one
    CHECK_EQ(left, 0);
  });
}

}  // namespace
}  // namespace torch_ring::test::device_poll_test
