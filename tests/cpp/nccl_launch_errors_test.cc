// SPDX-License-Identifier: Apache-2.0
// Engine::launch: ranks that fail, and devices that hang.
#include <latch>
#include <thread>

#include "nccl_launches.h"

namespace torch_ring::test::nccl_launch_errors_test {
namespace {

using std::chrono::milliseconds;

TEST(launches_wait_for_no_rank_that_has_failed) {
  const FaultsEnd end;
  faults().aborted = 0;
  std::latch both(2);
  run_launches(2, [&](Rank& rank, Tensors& tensors) {
    auto& first = tensors.emplace_back(3, 1.0f);
    agree(rank, first, "first");
    auto& values = tensors.emplace_back(3, 1.0f);
    // No other calls follow: only the engine's thread can hear of rank 1.
    if (rank.rank() == 0) launch(rank, values);
    both.arrive_and_wait();  // an end would overtake an agreement
    if (rank.rank() == 1) {
      CHECK_THROWS(rank.engine().end(Error(ErrorKind::kInternal, "out of luck")),
                   ErrorKind::kInternal, "out of luck");
    }
    wait_until([&] { return faults().aborted == 2; }, "both devices are aborted");
    if (rank.rank() == 0) {
      CHECK_THROWS(launch(rank, values), ErrorKind::kPeerLost,
                   "this world has ended: rank 1 (a thread) failed: out of luck");
    }
  });
}

TEST(device_without_work_is_aborted_when_a_rank_fails) {
  const FaultsEnd end;
  faults().aborted = 0;
  std::latch both(2);
  run_launches(2, [&](Rank& rank, Tensors& tensors) {
    auto& values = tensors.emplace_back(3, 1.0f);
    agree(rank, values, "first");
    both.arrive_and_wait();                          // an end would overtake an agreement
    std::this_thread::sleep_for(milliseconds(200));  // the engine's thread has found it idle
    if (rank.rank() == 1) {
      CHECK_THROWS(rank.engine().end(Error(ErrorKind::kInternal, "out of luck")),
                   ErrorKind::kInternal, "out of luck");
    }
    wait_until([&] { return faults().aborted == 2; }, "both devices are aborted");
  });
}

TEST(launch_that_nccl_does_not_take_has_a_deadline) {
  const FaultsEnd end;
  run_launches(
      1,
      [](Rank& rank, Tensors& tensors) {
        auto& values = tensors.emplace_back(3, 1.0f);
        agree(rank, values, "first");
        faults().in_progress = 1'000'000'000;
        CHECK_THROWS(launch(rank, values), ErrorKind::kTimeout,
                     "ncclAllReduce was not taken within 1 s");
        faults().in_progress = 0;
        CHECK_THROWS(launch(rank, values), ErrorKind::kTimeout,
                     "this world has ended: ncclAllReduce");
      },
      impatient());
}

TEST(launch_ends_when_the_job_does) {
  const FaultsEnd end;
  run_launches(1, [](Rank& rank, Tensors& tensors) {
    auto& values = tensors.emplace_back(3, 1.0f);
    agree(rank, values, "first");
    faults().in_progress = 1'000'000'000;
    std::thread thread([&] {
      std::this_thread::sleep_for(milliseconds(50));
      CHECK_THROWS(rank.engine().end(Error(ErrorKind::kPeerLost, "rank 7 is lost")),
                   ErrorKind::kPeerLost, "rank 7 is lost");
    });
    CHECK_THROWS(launch(rank, values), ErrorKind::kPeerLost, "rank 7 is lost");
    thread.join();
  });
}

TEST(error_of_a_launch_ends_the_job) {
  std::latch both(2);
  run_launches(2, [&](Rank& rank, Tensors& tensors) {
    auto& values = tensors.emplace_back(3, 1.0f);
    agree(rank, values, "first");
    both.arrive_and_wait();  // an end would overtake an agreement
    if (rank.rank() == 0) {
      const auto broken = [](Communicator&, Buffers&) { throw std::runtime_error("no memory"); };
      CHECK_THROWS(rank.engine().launch(launched(values), broken), ErrorKind::kInternal,
                   "no memory");
      const OperationRecord record = rank.engine().records().back();
      CHECK(record.is_launched() && record.state == OperationRecord::State::kFailed);
      CHECK_EQ(record.error, "no memory");
      const OperationTotals totals = rank.engine().totals();
      CHECK_EQ(totals.sums[static_cast<std::size_t>(Collective::kAllreduce)].failed, 1u);
    }
    auto& here = tensors.emplace_back(3);
    const auto kind = rank.rank() == 0 ? ErrorKind::kInternal : ErrorKind::kPeerLost;
    const auto use = [&] { rank.wait(rank.allreduce(here, "here")); };
    CHECK_THROWS(use(), kind, "no memory");
  });
}

/// A device whose call hangs until the device is aborted, like that of a stream with a full queue.
class HangingDevice final : public Device {
 public:
  HangingDevice(Communicator& host, std::latch& hangs) : host_(host), hangs_(hangs) {}

  Communicator& communicator() override { return host_; }
  Buffers& buffers() override { return buffers_; }
  void use(const std::function<void()>& enqueue) override {
    enqueue();
    if (!std::exchange(used_, true)) return;
    hangs_.count_down();
    aborted_.wait();
  }
  bool busy() override { return false; }
  void abort() noexcept override {
    if (!std::exchange(is_aborted_, true)) aborted_.count_down();
  }

 private:
  Communicator& host_;
  HostBuffers buffers_;
  std::latch& hangs_;
  std::latch aborted_{1};
  bool used_ = false;
  bool is_aborted_ = false;  // the progress thread's
};

void run_with_hanging_device(const std::function<void(Rank&, std::latch& hangs)>& fn,
                             const EngineConfig& config) {
  std::vector<World> worlds = make_worlds({0});
  std::latch hangs(1);
  Rank self(worlds.front(), nullptr, config,
            [&](std::uint8_t, Communicator& host, const Abort&) -> std::unique_ptr<Device> {
              return std::make_unique<HangingDevice>(host, hangs);
            });
  std::vector<float> values(3);
  agree(self, values, "first");
  fn(self, hangs);
}

TEST(launch_that_hangs_inside_the_device_is_freed_by_its_abort) {
  run_with_hanging_device(
      [](Rank& rank, std::latch& hangs) {
        std::vector<float> values(3);
        std::thread thread([&] { launch(rank, values); });
        hangs.wait();
        CHECK_THROWS(rank.engine().end(Error(ErrorKind::kPeerLost, "rank 7 is lost")),
                     ErrorKind::kPeerLost, "rank 7 is lost");
        thread.join();
      },
      impatient());
}

TEST(launch_that_hangs_inside_the_device_ends_the_job_after_the_timeout) {
  run_with_hanging_device(
      [](Rank& rank, std::latch&) {
        std::vector<float> values(3);
        launch(rank, values);  // hangs until the engine's thread aborts
        CHECK_THROWS(launch(rank, values), ErrorKind::kTimeout,
                     "a thread's call of the device has not returned within 1 s");
      },
      impatient());
}

}  // namespace
}  // namespace torch_ring::test::nccl_launch_errors_test
