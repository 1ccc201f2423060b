// SPDX-License-Identifier: Apache-2.0
// Engine::launch: the order of launches, and their records.
#include <atomic>
#include <latch>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "nccl_launches.h"

namespace torch_ring::test::nccl_launch_test {
namespace {

using std::chrono::milliseconds;

TEST(launches_and_agreed_requests_run_in_the_program_s_order) {
  for (const int size : {1, 2, 3}) {
    run_launches(size, [](Rank& rank, Tensors& tensors) {
      constexpr std::size_t kCount = 120;
      std::mt19937 random(7);  // the same program on all ranks
      std::vector<std::atomic<bool>> finished(kCount);
      std::vector<std::shared_ptr<Work>> works;
      for (std::size_t i = 0; i < kCount; ++i) {
        auto& values = tensors.emplace_back(rank.input(100 + 7 * i));  // sizes show the order
        switch (i == 0 ? 1 : random() % 4) {
          case 0:
            works.push_back(submit(rank, values, "", finished[i]));
            break;
          case 1:
            agree(rank, values, "now");
            break;
          default:
            launch(rank, values);
        }
      }
      for (const auto& work : works) rank.wait(work);
      rank.engine().close();  // waits for the stream
      for (const auto& values : tensors) {
        CHECK(values == Rank::sums(values.size(), rank.size()));
      }
    });
  }
}

TEST(launch_comes_after_this_rank_s_earlier_requests) {
  run_launches(2, [](Rank& rank, Tensors& tensors) {
    auto& first = tensors.emplace_back(3, 1.0f);
    agree(rank, first, "first");
    auto& values = tensors.emplace_back(rank.input(500));
    auto& launched = tensors.emplace_back(rank.input(300));
    std::atomic<bool> finished{false};
    if (rank.rank() == 1) std::this_thread::sleep_for(milliseconds(200));
    const auto work = submit(rank, values, "earlier", finished);
    launch(rank, launched);
    CHECK(work->done() && !work->failed());
    rank.engine().close();
    CHECK(values == Rank::sums(500, 2));
    CHECK(launched == Rank::sums(300, 2));
  });
}

TEST(launch_after_an_earlier_request_that_fails_runs_all_the_same) {
  run_launches(2, [](Rank& rank, Tensors& tensors) {
    auto& first = tensors.emplace_back(3, 1.0f);
    agree(rank, first, "first");
    auto& different = tensors.emplace_back(rank.rank() == 0 ? 3 : 4, 1.0f);
    auto& launched = tensors.emplace_back(rank.input(300));
    std::atomic<bool> finished{false};
    const auto work = submit(rank, different, "m", finished);
    launch(rank, launched);
    CHECK(work->done());
    CHECK_THROWS(rank.wait(work), ErrorKind::kMismatch, "rank 0: allreduce 'm' float32 [3]");
    rank.engine().close();
    CHECK(launched == Rank::sums(300, 2));
  });
}

TEST(late_rank_delays_no_launch_of_another) {
  std::latch launched(1);
  run_launches(2, [&](Rank& rank, Tensors& tensors) {
    constexpr std::size_t kLaunches = 200;
    agree(rank, tensors.emplace_back(rank.input(50)), "first");
    if (rank.rank() == 1) launched.wait();  // for ever, if rank 0's host waited for this rank
    for (std::size_t i = 0; i < kLaunches; ++i) {
      launch(rank, tensors.emplace_back(rank.input(50)));
    }
    if (rank.rank() == 0) launched.count_down();
    rank.engine().close();
    for (const auto& values : tensors) CHECK(values == Rank::sums(50, 2));
  });
}

TEST(launch_needs_a_device_and_an_open_engine) {
  run_launches(2, [](Rank& rank, Tensors& tensors) {
    auto& values = tensors.emplace_back(3, 1.0f);
    CHECK_THROWS(launch(rank, values), ErrorKind::kInternal,
                 "a launch needs an agreed operation on the device before it");
    agree(rank, values, "first");
    launch(rank, values);
    rank.engine().close();
    CHECK_THROWS(launch(rank, values), ErrorKind::kInternal, "torch_ring was shut down");
    CHECK(values == std::vector<float>(3, 4.0f));
  });
}

/// Launches that a rank has promised, of which its program makes some; the watch makes the rest.
class Promise {
 public:
  Promise(Rank& rank, Tensors& tensors) : rank_(rank), tensors_(tensors) {
    Engine::Watch watch{{std::this_thread::get_id()}, [this] { keep(); }};
    rank.engine().set_watch(std::make_shared<const Engine::Watch>(std::move(watch)));
  }

  void launch(int count) {
    const std::scoped_lock lock(mutex_);
    for (int i = 0; i < count; ++i) launch();
  }

  int made() {
    const std::scoped_lock lock(mutex_);
    return made_;
  }

  static constexpr int kPromised = 4;

 private:
  void keep() {
    const std::scoped_lock lock(mutex_);
    while (made_ < kPromised) launch();
  }

  void launch() {
    auto& values = tensors_.emplace_back(rank_.input(50));
    rank_.engine().launch(launched(values), sum_of(values), {}, true);
    ++made_;
  }

  Rank& rank_;
  Tensors& tensors_;
  std::mutex mutex_;
  int made_ = 0;
};

Request barrier_named(const std::string& name) {
  Request request;
  request.fingerprint.collective = Collective::kBarrier;
  request.fingerprint.name = name;
  return request;
}

TEST(watch_keeps_a_promise_before_whatever_else_the_program_requests) {
  enum Other { kOnDevice, kOnHost, kLaunch, kClose };
  for (const Other other : {kOnDevice, kOnHost, kLaunch, kClose}) {
    run_launches(3, [&](Rank& rank, Tensors& tensors) {
      agree(rank, tensors.emplace_back(rank.input(50)), "first");
      Promise promise(rank, tensors);
      promise.launch(rank.rank() == 1 ? 1 : Promise::kPromised);
      Tensors others;
      if (other == kOnDevice) agree(rank, others.emplace_back(rank.input(70)), "next");
      if (other == kOnHost)
        rank.wait(rank.engine().submit(barrier_named("b"), Engine::Mode::kBlocking));
      if (other == kLaunch) launch(rank, others.emplace_back(rank.input(70)));
      rank.engine().close();
      CHECK(promise.made() == Promise::kPromised);
      for (const auto& values : tensors) CHECK(values == Rank::sums(50, 3));
      for (const auto& values : others) CHECK(values == Rank::sums(70, 3));
    });
  }
}

TEST(host_request_of_another_thread_is_no_business_of_a_watch) {
  run_launches(2, [](Rank& rank, Tensors& tensors) {
    agree(rank, tensors.emplace_back(rank.input(50)), "first");
    Promise promise(rank, tensors);
    promise.launch(1);
    std::thread([&] {
      rank.wait(rank.engine().submit(barrier_named("b"), Engine::Mode::kBlocking));
    }).join();
    CHECK(promise.made() == 1);
    rank.engine().close();
    for (const auto& values : tensors) CHECK(values == Rank::sums(50, 2));
  });
}

TEST(ranks_that_have_launched_differently_get_a_mismatch) {
  run_launches(
      3,
      [](Rank& rank, Tensors& tensors) {
        auto& agreed = tensors.emplace_back(3, 1.0f);
        agree(rank, agreed, "first");
        for (int i = 0; i < (rank.rank() == 1 ? 1 : 3); ++i) {
          launch(rank, tensors.emplace_back(5, 1.0f));
        }
        for (int repeat = 0; repeat < 2; ++repeat) {
          std::atomic<bool> finished{false};
          const auto work = submit(rank, agreed, "next", finished);
          CHECK_THROWS(rank.wait(work), ErrorKind::kMismatch,
                       "rank 0 has launched 3 reductions on its device before it, rank 1 1. With "
                       "run_ahead=False");
        }
        auto& here = tensors.emplace_back(rank.input(5));  // the host's requests do not count
        rank.wait(rank.allreduce(here, "here"));
        CHECK(here == Rank::sums(5, rank.size()));
      },
      impatient());
}

TEST(launches_of_several_threads_are_one_after_the_other) {
  run_launches(1, [](Rank& rank, Tensors& tensors) {
    constexpr int kThreads = 4;
    constexpr int kLaunches = 200;
    auto& values = tensors.emplace_back(3, 1.0f);
    agree(rank, values, "first");
    int inside = 0;  // not atomic: one thread at a time is inside
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&] {
        for (int i = 0; i < kLaunches; ++i) {
          rank.engine().launch(launched(values), [&](Communicator& communicator, Buffers&) {
            ++inside;
            communicator.allreduce(values.data(), values.data(), values.size(),
                                   {DType::kFloat32, ReduceOp::kSum, {}});
          });
        }
      });
    }
    auto& mine = tensors.emplace_back(3, 1.0f);
    for (int i = 0; i < 50; ++i) agree(rank, mine, "mine");
    for (std::thread& thread : threads) thread.join();
    rank.engine().close();
    CHECK_EQ(inside, kThreads * kLaunches);
  });
}

TEST(engine_closes_while_a_thread_launches) {
  for (int repeat = 0; repeat < 2; ++repeat) {
    run_launches(
        2,
        [&](Rank& rank, Tensors& tensors) {
          auto& values = tensors.emplace_back(3, 0.0f);
          agree(rank, values, "first");
          std::latch launched(1);
          std::thread thread([&] {
            const auto for_ever = [&] {
              for (int i = 0;; ++i) {
                launch(rank, values);
                if (i == 10) launched.count_down();
              }
            };
            CHECK_THROWS(for_ever(), ErrorKind::kInternal, "rank");  // this one's or another's end
          });
          launched.wait();
          rank.engine().close();
          thread.join();
        },
        impatient());
  }
}

TEST(launches_are_recorded_in_an_order_of_their_own) {
  run_launches(2, [](Rank& rank, Tensors& tensors) {
    auto& values = tensors.emplace_back(3, 1.0f);
    auto& larger = tensors.emplace_back(50, 1.0f);
    const auto stream = std::make_shared<RecordStream>(10);
    rank.engine().observe(stream);
    agree(rank, values, "first");
    launch(rank, values);
    launch(rank, larger);
    agree(rank, values, "second");
    rank.engine().close();
    std::vector<OperationRecord> seen;
    stream->take(seen, 10);
    for (const auto& records : {rank.engine().records(), seen}) {
      CHECK_EQ(records.size(), 4u);
      constexpr std::uint64_t kLaunches = OperationRecord::kLaunches;
      const std::vector<std::uint64_t> sequences{1, kLaunches + 1, kLaunches + 2, 2};
      const std::vector<std::size_t> bytes{12, 12, 200, 12};
      for (std::size_t i = 0; i < records.size(); ++i) {
        CHECK_EQ(records[i].number, i + 1);
        CHECK_EQ(records[i].sequence, sequences[i]);
        CHECK_EQ(records[i].is_launched(), i == 1 || i == 2);
        CHECK_EQ(records[i].bytes, bytes[i]);
        CHECK(records[i].state == OperationRecord::State::kFinished);
        CHECK(records[i].submitted <= records[i].finished);
      }
    }
    const OperationTotals totals = rank.engine().totals();
    const auto& sums = totals.sums[static_cast<std::size_t>(Collective::kAllreduce)];
    CHECK_EQ(sums.operations, 4u);
    CHECK_EQ(sums.bytes, 236u);
    std::uint64_t agreed = 0;
    for (const std::uint64_t count : totals.lags) agreed += count;
    CHECK_EQ(agreed, 2u);
  });
}

}  // namespace
}  // namespace torch_ring::test::nccl_launch_test
