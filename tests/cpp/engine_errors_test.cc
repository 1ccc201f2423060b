// SPDX-License-Identifier: Apache-2.0
// Engine errors: ranks that disagree, leave, fall silent, or interrupt a wait.
#include <atomic>
#include <cstring>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/at.h"
#include "engine_ranks.h"

namespace torch_ring::test::engine_errors_test {
namespace {

const bool kMismatch = on_all_layouts(
    "a mismatch is an error everywhere, and life goes on",
    [](Rank& rank) {
      std::vector<float> values(rank.rank() == 0 ? 3 : 4, 1.0f);
      CHECK_THROWS(rank.wait(rank.allreduce(values, "m")), ErrorKind::kMismatch,
                   "rank 0: allreduce 'm' float32 [3]");
      std::vector<float> again = rank.input(5);
      rank.wait(rank.allreduce(again, "m"));
      CHECK(again == Rank::sums(5, rank.size()));
    },
    2);

const bool kDeadlock = on_all_layouts(
    "waiting for different names is an error, and life goes on",
    [](Rank& rank) {
      std::vector<float> values(3, 1.0f);
      const std::string name = "of rank " + std::to_string(rank.rank());
      CHECK_THROWS(rank.wait(rank.allreduce(values, name)), ErrorKind::kMismatch,
                   "allreduce 'of rank 1'");
      std::vector<float> again = rank.input(5);
      rank.wait(rank.allreduce(again, "together"));
      CHECK(again == Rank::sums(5, rank.size()));
    },
    2);

TEST(ranks_whose_threads_wait_for_different_names_get_an_error_before_the_timeout) {
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(1200);  // of which 900 are for other threads
  run_engines(
      {0, 1},
      [](Rank& rank) {
        std::vector<float> values = rank.input(3);
        // Another thread has submitted something, and may do so again.
        std::thread([&] { rank.wait(rank.allreduce(values, "first")); }).join();
        const bool first = rank.rank() == 0;
        const auto begin = Clock::now();
        std::vector<float> late(3);
        CHECK_THROWS(rank.wait(rank.allreduce(late, first ? "a" : "b")), ErrorKind::kMismatch,
                     "the ranks wait for different collectives");
        CHECK(Clock::now() - begin >= std::chrono::milliseconds(600));
      },
      config);
}

const bool kFinishThrows = on_all_layouts(
    "a result that cannot be written fails its work alone, and life goes on", [](Rank& rank) {
      for (const std::size_t count : {5u, 20'000u}) {
        std::vector<float> broken = rank.input(count);
        std::vector<float> other = rank.input(count);
        std::vector<Request> requests(2);
        requests[0] = Rank::allreduce_of(broken, "broken");
        requests[1] = Rank::allreduce_of(other, "other");
        if (rank.rank() == 0) {
          requests[0].finish = [] { throw std::runtime_error("no such memory"); };
        }
        const auto works = rank.engine().submit(std::move(requests), Engine::Mode::kAsynchronous);
        if (rank.rank() == 0) {
          CHECK_THROWS(rank.wait(works[0]), ErrorKind::kInvalidArgument,
                       "rank 0: allreduce 'broken' float32 [" + std::to_string(count) +
                           "] Sum: the result cannot be written: no such memory");
        } else {
          rank.wait(works[0]);
        }
        rank.wait(works[1]);
        CHECK(other == Rank::sums(count, rank.size()));
        std::vector<float> again = rank.input(count);
        rank.wait(rank.allreduce(again, "broken"));
        CHECK(again == Rank::sums(count, rank.size()));
      }
    });

const bool kLeaves = on_all_layouts(
    "a rank that leaves early is named",
    [](Rank& rank) {
      if (rank.rank() == 0) return;  // its engine says goodbye
      std::vector<float> values(3);
      CHECK_THROWS(rank.wait(rank.allreduce(values, "late")), ErrorKind::kPeerLost,
                   "rank 0 (a thread)");
    },
    2);

TEST(stall_warning_and_timeout_say_what_the_late_rank_does_and_what_to_do) {
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(400);
  config.stall_warning = std::chrono::milliseconds(100);
  const std::string late =
      "rank 2 (a thread) has not called it (it is computing, in no collective). All ranks must "
      "call it, in the same order";
  std::latch done(2);
  run_engines(
      {0, 0, 0},
      [&](Rank& rank) {
        std::vector<float> values(3);
        if (rank.rank() == 2) {
          done.wait();
          CHECK_THROWS(rank.wait(rank.allreduce(values, "late")), ErrorKind::kTimeout, "rank");
          return;
        }
        // The second rank to give up may have the first one's cause from its watchdog.
        const std::string cause =
            "allreduce 'x' float32 [3] Sum: gave up after 0.4 s "
            "(TORCH_RING_TIMEOUT): " +
            late;
        CHECK_THROWS(rank.wait(rank.allreduce(values, "x")), ErrorKind::kTimeout, cause);
        const std::string log = rank.log();
        CHECK(log.find(" s for allreduce 'x' float32 [3] Sum: " + late +
                       ". Ready: rank 0, rank 1. It fails after 0.4 s (TORCH_RING_TIMEOUT)") !=
              std::string::npos);
        CHECK(log.find(std::string("rank ") + std::to_string(rank.rank()) + " has waited 0.") == 0);
        done.count_down();
      },
      config);
}

/// Checks that the last line in the ranks' logs names only the late rank. `slow`: another late
/// rank, which arrives after the ranks have warned, and so have announced their waits.
void check_accusation(const std::vector<int>& host_of, int late, int slow) {
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(0);
  config.stall_warning = std::chrono::milliseconds(100);
  const auto size = static_cast<int>(host_of.size());
  std::latch seen(size - 1);
  std::latch warned(1);
  std::once_flag has_warned;
  run_engines(
      host_of,
      [&](Rank& rank) {
        std::vector<float> values(3);
        const std::string culprit =
            ": rank " + std::to_string(late) + " (a thread) has not called it (it is computing, ";
        const std::string others = "thread) has not called it";
        if (rank.rank() == late) {
          seen.wait();
          return rank.wait(rank.allreduce(values, "x"));
        }
        if (rank.rank() == slow) warned.wait();
        int right = 0;
        const auto work = rank.allreduce(values, "x");
        rank.engine().wait(*work, [&] {
          const std::string log = rank.log();
          if (!log.empty()) std::call_once(has_warned, [&] { warned.count_down(); });
          const auto end = log.rfind('\n');
          if (right > 0 || end == std::string::npos) return;
          const std::string last = log.substr(log.rfind('\n', end - 1) + 1);
          const bool named = last.find(culprit) != std::string::npos;
          if (!named || last.find(others) != last.rfind(others)) return;
          CHECK(last.find("It goes on waiting: TORCH_RING_TIMEOUT is not set") !=
                std::string::npos);
          ++right;
          seen.count_down();
        });
        CHECK_EQ(right, 1);
      },
      config);
}

const bool kAccusations = [] {
  for (const Hosts& layout : kLayouts) {
    const auto size = static_cast<int>(layout.host_of.size());
    if (size != 3 && layout.host_of != std::vector{0, 1, 0, 1}) continue;
    for (int late = 0; late < size; ++late) {
      const int slow = (late + 1) % size;
      add_test(std::string("engine, ") + layout.name + ": warnings name rank " +
                   std::to_string(late) + ", which is late, and no more rank " +
                   std::to_string(slow) + ", which has come",
               [=] { check_accusation(layout.host_of, late, slow); });
    }
  }
  return true;
}();

TEST(pending_and_later_requests_fail_with_the_first_fatal_error) {
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(200);
  run_engines(
      {0, 1},
      [&](Rank& rank) {
        std::vector<float> values(3);
        const bool first = rank.rank() == 0;
        const auto work = rank.allreduce(values, first ? "a" : "b");
        while (!work->done()) std::this_thread::yield();
        CHECK_THROWS(rank.wait(work), ErrorKind::kTimeout, "(it is in allreduce '");
        CHECK_THROWS(rank.allreduce(values, "later"), ErrorKind::kTimeout,
                     std::string("rank ") + (first ? "0" : "1") + ": this world has ended: ");
        CHECK_THROWS(rank.allreduce(values, "later"), ErrorKind::kTimeout,
                     " has not called it (it is in allreduce '");
      },
      config);
}

/// Waits for a work; `handler` interrupts the wait once, like a signal handler.
void wait_with(Rank& rank, const std::shared_ptr<Work>& work,
               const std::function<void()>& handler) {
  bool handled = false;
  rank.engine().wait(*work, [&] {
    if (!std::exchange(handled, true)) handler();
  });
}

const bool kWaitsInInterrupt = on_all_layouts(
    "an interrupt waits for works of its own",
    [](Rank& rank) {
      std::vector<float> outer = rank.input(20'000);
      std::vector<float> inner = rank.input(30'000);
      if (rank.rank() == 0) {
        wait_with(rank, rank.allreduce(outer, "outer"), [&] {
          rank.wait(rank.allreduce(inner, "inner"));
          CHECK(inner == Rank::sums(30'000, rank.size()));
        });
      } else {
        rank.wait(rank.allreduce(inner, "inner"));
        rank.wait(rank.allreduce(outer, "outer"));
      }
      CHECK(outer == Rank::sums(20'000, rank.size()));
    },
    2);

/// Returns when another thread has begun to close the engine.
void until_closing(Rank& rank) {
  const auto is_refused = [&] {
    try {
      rank.engine().submit(std::vector<Request>{}, Engine::Mode::kBlocking);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  while (!is_refused()) std::this_thread::yield();
}

TEST(second_caller_of_close_waits_for_the_first) {
  run_engines({0}, [](Rank& rank) {
    std::vector<float> values(3);
    std::latch runs(1);
    std::latch may_end(1);
    std::atomic<bool> has_ended{false};
    Request request = Rank::allreduce_of(values, "x");
    request.finish = [&] {
      runs.count_down();
      may_end.wait();
      has_ended = true;
    };
    const auto work = rank.engine().submit(std::move(request), Engine::Mode::kAsynchronous);
    runs.wait();
    std::thread first([&] { rank.engine().close(); });
    until_closing(rank);
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // a caller has returned by now
      may_end.count_down();
    });
    rank.engine().close();
    const bool ended_before = has_ended;
    first.join();
    later.join();
    CHECK(ended_before);
  });
}

const bool kClosesTwice = on_all_layouts(
    "an interrupt closes the engine that another thread is closing",
    [](Rank& rank) {
      std::vector<float> values(3);
      const auto work = rank.allreduce(values, "x" + std::to_string(rank.rank()));
      if (rank.rank() == 0) {
        std::thread first;
        const auto close = [&] {
          first = std::thread([&] { rank.engine().close(); });  // it waits for the role
          until_closing(rank);
          rank.engine().close();
        };
        CHECK_THROWS(wait_with(rank, work, close), ErrorKind::kInternal, "shut down");
        CHECK_THROWS(rank.allreduce(values, "later"), ErrorKind::kInternal, "shut down");
        first.join();
      } else {
        CHECK_THROWS(rank.wait(work), ErrorKind::kPeerLost, "rank 0 (a thread)");
      }
    },
    2);

TEST(log_handler_that_waits_for_a_work_gets_an_error) {
  EngineConfig config = patient();
  config.stall_warning = std::chrono::milliseconds(50);
  std::latch refused(1);
  std::vector<float> gate(3);  // rank 0's, in flight until its engine ends
  run_engines(
      {0, 0},
      [&](Rank& rank) {
        std::vector<float> values(3);
        if (rank.rank() == 0) {
          rank.on_log([&, asked = false]() mutable {
            if (std::exchange(asked, true)) return;
            CHECK_THROWS(rank.wait(rank.allreduce(gate, "gate")), ErrorKind::kInvalidArgument,
                         "rank 0: a log handler cannot wait for allreduce 'gate'");
            refused.count_down();
          });
          rank.wait(rank.allreduce(values, "x"));
        } else {
          refused.wait();
          rank.wait(rank.allreduce(values, "x"));
        }
      },
      config);
}

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
    if (rank == 1) std::this_thread::sleep_for(milliseconds(200));
    allreduce(self, "b");
    const auto deadline = Clock::now() + milliseconds(10000);
    while (polls_left > 0 && Clock::now() < deadline) std::this_thread::yield();
    const int left = polls_left;
    both.arrive_and_wait();  // because a rank that closes wakes the other one
    CHECK_EQ(left, 0);
  });
}

}  // namespace
}  // namespace torch_ring::test::engine_errors_test
