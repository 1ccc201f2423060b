// SPDX-License-Identifier: Apache-2.0
// Engine: results of its collectives, in any order of submission.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <numeric>
#include <thread>

#include "engine_ranks.h"

namespace torch_ring::test::engine_test {
namespace {

const bool kBlocking = on_all_layouts("blocking requests of many sizes", [](Rank& rank) {
  for (const std::size_t count :
       {1u, 100u, 1000u, 5000u, 100'000u, kSanitized ? 200'001u : 700'001u}) {
    std::vector<float> values = rank.input(count);
    rank.wait(rank.allreduce(values, "", Engine::Mode::kBlocking));
    CHECK(values == Rank::sums(count, rank.size()));
  }
});

const bool kAnyOrder = on_all_layouts("any order of submission, matched by name", [](Rank& rank) {
  constexpr int kRequests = 40;
  for (int repeat = 0; repeat < (kSanitized ? 1 : 5); ++repeat) {
    std::vector<int> order(kRequests);
    std::iota(order.begin(), order.end(), 0);
    std::rotate(order.begin(), order.begin() + 7 * rank.rank(), order.end());
    if (rank.rank() % 2 == 1) std::reverse(order.begin(), order.end());
    std::vector<std::vector<float>> values(kRequests);
    std::vector<std::shared_ptr<Work>> works(kRequests);
    for (const int i : order) {
      const auto index = static_cast<std::size_t>(i);
      values[index] = rank.input(index * 300);
      works[index] = rank.allreduce(values[index], "tensor " + std::to_string(i));
    }
    for (std::size_t i = 0; i < kRequests; ++i) {
      rank.wait(works[i]);
      CHECK(values[i] == Rank::sums(i * 300, rank.size()));
    }
  }
});

const bool kWaitInAnyOrder =
    on_all_layouts("a rank waits before it submits the rest", [](Rank& rank) {
      // Rank 0 submits b, then a, and has both in flight. The others submit a first, and b only
      // when a is done.
      std::vector<float> a = rank.input(10);
      std::vector<float> b = rank.input(20'000);
      if (rank.rank() == 0) {
        const auto work_b = rank.allreduce(b, "b");
        rank.wait(rank.allreduce(a, "a"));
        rank.wait(work_b);
      } else {
        rank.wait(rank.allreduce(a, "a"));
        rank.wait(rank.allreduce(b, "b"));
      }
      CHECK(a == Rank::sums(10, rank.size()));
      CHECK(b == Rank::sums(20'000, rank.size()));
    });

/// Returns when this rank has announced all its requests: then its engine's thread has the role of
/// the progress thread, and keeps it while it waits for other ranks and no thread waits here.
void until_announced(Rank& rank) {
  const auto is_announced = [](const OperationRecord& record) { return record.round > 0; };
  while (!std::ranges::all_of(rank.engine().records(), is_announced)) std::this_thread::yield();
}

/// Returns when the work is done, without making progress on it.
void poll(const std::shared_ptr<Work>& work) {
  const auto deadline = Clock::now() + patient().timeout;
  while (!work->done()) {
    if (Clock::now() > deadline) throw CheckFailed("nobody makes progress");
    std::this_thread::yield();
  }
  work->check();
}

/// Waits for a work until the first interrupt. Returns whether there was one.
bool wait_is_interrupted(Rank& rank, const std::shared_ptr<Work>& work) {
  struct Stop {};
  try {
    rank.engine().wait(*work, [] { throw Stop(); });
  } catch (const Stop&) {
    return true;
  }
  return false;
}

/// Registers a test for each layout of several ranks; `fn` gets a gate, which rank 0 opens.
bool with_gate(const std::string& name, const std::function<void(Rank&, std::latch&)>& fn) {
  for (const Hosts& layout : kLayouts) {
    const std::size_t size = layout.host_of.size();
    if (size < 2 || size > kMostRanks) continue;
    add_test(std::string("engine, ") + layout.name + ": " + name, [=] {
      std::latch gate(1);
      run_engines(layout.host_of, [&](Rank& rank) { fn(rank, gate); });
    });
  }
  return true;
}

const bool kWaiterGivesUp =
    with_gate("a waiter that gives up leaves its work to the engine's thread",
              [](Rank& rank, std::latch& gate) {
                std::vector<float> values = rank.input(20'000);
                if (rank.rank() == 0) {
                  const auto work = rank.allreduce(values, "polled");
                  until_announced(rank);  // the engine's thread has to yield to the waiter
                  CHECK(wait_is_interrupted(rank, work));
                  gate.count_down();
                  poll(work);
                } else {
                  gate.wait();
                  rank.wait(rank.allreduce(values, "polled"));
                }
                CHECK(values == Rank::sums(20'000, rank.size()));
              });

const bool kLastWaiterLeaves = on_all_layouts(
    "the last waiter leaves with its result, and the engine's thread goes on",
    [](Rank& rank) {
      for (int repeat = 0; repeat < (kSanitized ? 3 : 10); ++repeat) {
        std::vector<float> first = rank.input(300);
        std::vector<float> second = rank.input(20'000);
        if (rank.rank() == 0) {
          // The engine's thread runs the first one. A thread waits for it, and wakes up slowly; the
          // engine's thread has yielded to it meanwhile.
          std::latch runs(1);
          Request request = Rank::allreduce_of(first, "first");
          request.finish = [&] {
            runs.count_down();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          };
          const auto work = rank.engine().submit(std::move(request), Engine::Mode::kAsynchronous);
          const auto polled = rank.allreduce(second, "second");
          runs.wait();
          std::thread([&] {
            const sched_param lowest{};
            CHECK_EQ(::pthread_setschedparam(::pthread_self(), SCHED_IDLE, &lowest), 0);
            rank.wait(work);
          }).join();
          poll(polled);
        } else {
          rank.wait(rank.allreduce(first, "first"));
          rank.wait(rank.allreduce(second, "second"));
        }
        CHECK(second == Rank::sums(20'000, rank.size()));
      }
    },
    2);

const bool kThreads = on_all_layouts("several threads of a rank wait at once", [](Rank& rank) {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        std::vector<float> values = rank.input(64);
        rank.wait(rank.allreduce(values, std::to_string(t) + "." + std::to_string(i),
                                 Engine::Mode::kBlocking));
        right += values == Rank::sums(64, rank.size());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(right.load(), 80);
});

/// A request whose output size depends on the ranks' rows, with its output and rows.
struct Ragged {
  std::vector<std::int32_t> output;
  std::vector<std::int64_t> rows;

  Request request(Collective collective, const std::vector<std::int32_t>& input,
                  std::vector<std::int64_t> own_rows) {
    Request request;
    request.fingerprint.collective = collective;
    request.fingerprint.dtype = DType::kInt32;
    request.rows = std::move(own_rows);
    request.input = input.data();
    request.allocate = [this](std::span<const std::int64_t> all) -> void* {
      rows.assign(all.begin(), all.end());
      const auto count = std::accumulate(all.begin(), all.end(), std::int64_t{0});
      output.resize(static_cast<std::size_t>(count));
      return output.data();
    };
    return request;
  }
};

void alltoall_small_and_large(Rank& rank) {
  for (const std::int64_t unit : {1, 30'000, 400'000}) {  // several pieces (kPacked)
    // Rank s sends (s + r) % 3 * unit numbers to rank r, each 1000 s + r.
    std::vector<std::int32_t> input;
    std::vector<std::int64_t> splits;
    std::vector<std::int32_t> expected;
    for (int peer = 0; peer < rank.size(); ++peer) {
      splits.push_back((rank.rank() + peer) % 3 * unit);
      const auto count = static_cast<std::size_t>(splits.back());
      input.insert(input.end(), count, 1000 * rank.rank() + peer);
      expected.insert(expected.end(), count, 1000 * peer + rank.rank());
    }
    Ragged ragged;
    rank.wait(rank.engine().submit(ragged.request(Collective::kAlltoall, input, splits),
                                   Engine::Mode::kBlocking));
    CHECK_EQ(ragged.rows, splits);
    CHECK(ragged.output == expected);
  }
}

void alltoall_that_tells_what_it_expects(Rank& rank) {
  for (const std::int64_t unit : {1, 30'000}) {
    const auto size = static_cast<std::size_t>(rank.size());
    const std::vector<std::int32_t> input(size * static_cast<std::size_t>(unit), rank.rank());
    for (const bool fits : {false, true, false}) {
      // Each rank sends `unit` numbers to each; the last rank may expect none from the first.
      std::vector<std::int64_t> rows(2 * size, unit);
      if (!fits && rank.rank() == rank.size() - 1) rows[size] = 0;
      Ragged ragged;
      Request request = ragged.request(Collective::kAlltoall, input, rows);
      request.fingerprint.tells_expected = true;
      CHECK_EQ(request.input_bytes(), input.size() * sizeof(std::int32_t));
      const auto run = [&] {
        rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
      };
      if (fits) {
        run();
        CHECK_EQ(ragged.rows, std::vector<std::int64_t>(size, unit));
        for (std::size_t i = 0; i < input.size(); ++i) {
          CHECK_EQ(ragged.output[i], static_cast<std::int32_t>(i) / unit);
        }
        continue;
      }
      const std::string last = std::to_string(rank.size() - 1);
      CHECK_THROWS(run(), ErrorKind::kMismatch,
                   "rank 0 sends " + std::to_string(unit) + " elements to rank " + last +
                       ", which expects 0");
      CHECK(ragged.output.empty());  // no data has moved
    }
  }
}

const bool kAlltoall = on_all_layouts("alltoall, small and large", alltoall_small_and_large);
const bool kExpecting =
    on_all_layouts("alltoall that tells what it expects", alltoall_that_tells_what_it_expects);
const bool kApart = on_all_layouts(
    "alltoall whose rows are exchanged as data, as among hundreds of ranks",
    [](Rank& rank) {
      alltoall_small_and_large(rank);
      alltoall_that_tells_what_it_expects(rank);
    },
    1, "alltoall.rows:close");

const bool kReducescatter = on_all_layouts("reducescatter, small and large", [](Rank& rank) {
  for (const std::int64_t row : {1, 20'000}) {
    const std::int64_t rows = 2 * rank.size() + 1;  // the first rank gets three
    const auto shares = scattered_rows(rows, rank.size());
    const auto begin =
        row * std::accumulate(shares.begin(), shares.begin() + rank.rank(), std::int64_t{0});
    const std::vector<float> input = rank.input(static_cast<std::size_t>(rows * row));
    std::vector<float> output(static_cast<std::size_t>(row * at(shares, rank.rank())));
    Request request;
    request.fingerprint.collective = Collective::kReducescatter;
    request.fingerprint.shape = {rows, row};
    request.input = input.data();
    request.output = output.data();
    rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
    const std::vector<float> sums = Rank::sums(input.size(), rank.size());
    CHECK(std::equal(output.begin(), output.end(), sums.begin() + begin));
  }
});

std::int64_t join(Rank& rank) {
  std::int64_t last = -1;
  Request request;
  request.fingerprint.collective = Collective::kJoin;
  request.fingerprint.name = kJoinKey;
  request.output = &last;
  rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
  return last;
}

const bool kJoin = on_all_layouts("ranks join one after the other, twice", [](Rank& rank) {
  for (int repeat = 0; repeat < 2; ++repeat) {
    // Rank r takes r + 1 steps: in step i the ranks from i on contribute ones, the others have
    // joined.
    for (int step = 0; step <= rank.rank(); ++step) {
      for (const std::size_t count : {7u, 50'000u}) {
        std::vector<float> ones(count, 1.0f);
        rank.wait(rank.allreduce(ones, "", Engine::Mode::kBlocking));
        CHECK(ones == std::vector<float>(count, static_cast<float>(rank.size() - step)));
      }
    }
    CHECK_EQ(join(rank), rank.size() - 1);
  }
});

TEST(join_does_not_time_out_while_other_ranks_make_progress) {
  using std::chrono::milliseconds;
  EngineConfig config = patient();
  config.timeout = milliseconds(2000);
  run_engines(
      {0, 0},
      [](Rank& rank) {
        std::vector<float> values(3, 1.0f);
        if (rank.rank() == 0) {
          const auto work = rank.allreduce(values, "first");
          std::this_thread::sleep_for(milliseconds(100));  // announced before the join is submitted
          CHECK_EQ(join(rank), 1);
          rank.wait(work);
          return;
        }
        // Longer than the timeout in total, but shorter between two operations.
        for (const char* name : {"first", "second"}) {
          std::this_thread::sleep_for(milliseconds(1200));
          rank.wait(rank.allreduce(values, name));
        }
        CHECK_EQ(join(rank), 1);
      },
      config);
}

const bool kJoinable = on_all_layouts(
    "a joinable allgather leaves out who has joined, others fail and the job goes on",
    [](Rank& rank) {
      if (rank.rank() > 0) {
        const std::vector<std::int32_t> input(3, rank.rank());
        Ragged ragged;
        Request request = ragged.request(Collective::kAllgather, input, {3});
        request.fingerprint.joinable = true;
        rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
        CHECK_EQ(ragged.output.size(), static_cast<std::size_t>(3 * (rank.size() - 1)));
        CHECK_EQ(ragged.rows[0], 0);
        const auto work = rank.engine().submit(ragged.request(Collective::kAllgather, input, {3}),
                                               Engine::Mode::kBlocking);
        CHECK_THROWS(rank.wait(work), ErrorKind::kMismatch, "called join(): rank 0");
      }
      join(rank);
      std::vector<float> values = rank.input(5);
      rank.wait(rank.allreduce(values, "", Engine::Mode::kBlocking));
      CHECK(values == Rank::sums(5, rank.size()));
    },
    2);

const bool kEras = on_all_layouts(
    "ranks that have numbered differently are in step after a barrier",
    [](Rank& rank) {
      std::vector<float> unmatched[4];  // these stay in flight
      for (int extra = 0; extra < rank.rank(); ++extra) rank.allreduce(unmatched[extra], "");
      Request request;
      request.fingerprint.collective = Collective::kBarrier;
      rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
      std::vector<float> values = rank.input(5);
      rank.wait(rank.allreduce(values, "", Engine::Mode::kBlocking));
      CHECK(values == Rank::sums(5, rank.size()));
    },
    2);

}  // namespace
}  // namespace torch_ring::test::engine_test
