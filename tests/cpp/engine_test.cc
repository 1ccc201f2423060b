// Engines of several ranks, as threads, over every communicator.
#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <latch>
#include <numeric>

#include "test_world.h"

namespace torch_ring::test {
namespace {

/// One rank's engine over a communicator of its own, and the tensors of its requests.
class Rank {
 public:
  Rank(World& world, const EngineConfig& config)
      : abort_(std::make_shared<Abort>()),
        communicator_(make_communicator(world, config, *abort_)),
        engine_(communicator_, abort_,
                {config, world.labels, std::move(world.control), [this](const std::string& text) {
                   const std::scoped_lock lock(mutex_);
                   log_ += text + "\n";
                 }}) {}

  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }
  Engine& engine() { return engine_; }
  std::string log() {
    const std::scoped_lock lock(mutex_);
    return log_;
  }

  /// Sum of element i = i * size + rank over the ranks.
  static std::vector<float> sums(std::size_t count, int size) {
    std::vector<float> sums(count);
    for (std::size_t i = 0; i < count; ++i) {
      sums[i] = static_cast<float>(i) * static_cast<float>(size * size) +
                static_cast<float>(size * (size - 1) / 2);
    }
    return sums;
  }

  std::vector<float> input(std::size_t count) const {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(i) * static_cast<float>(size()) + static_cast<float>(rank());
    }
    return values;
  }

  std::shared_ptr<Work> allreduce(std::vector<float>& values, const std::string& name,
                                  Engine::Mode mode = Engine::Mode::kAsynchronous) {
    Request request;
    request.fingerprint.name = name;
    request.fingerprint.shape = {static_cast<std::int64_t>(values.size())};
    request.input = request.output = values.data();
    return engine_.submit(std::move(request), mode);
  }

  void wait(const std::shared_ptr<Work>& work) { engine_.wait(*work, {}); }

 private:
  std::mutex mutex_;
  std::string log_;
  std::shared_ptr<Abort> abort_;
  std::shared_ptr<Communicator> communicator_;
  Engine engine_;
};

void run_engines(const std::vector<int>& host_of, const std::function<void(Rank&)>& fn,
                 const EngineConfig& config = patient()) {
  std::vector<World> worlds = make_worlds(host_of);
  run_ranks(static_cast<int>(host_of.size()), [&](int rank) {
    Rank self(worlds[static_cast<std::size_t>(rank)], config);
    fn(self);
  });
}

struct Layout {
  const char* name;
  std::vector<int> host_of;
};
const std::vector<Layout> kLayouts{
    {"one rank", {0}},
    {"shm x2", {0, 0}},
    {"shm x3", {0, 0, 0}},
    {"tcp x2", {0, 1}},
    {"tcp x3", {0, 1, 2}},
    {"2 hosts x2", {0, 0, 1, 1}},
    {"hosts of 2 and 1", {0, 0, 1}},
    {"interleaved", {0, 1, 0, 1}},
    {"tcp x4", {0, 1, 2, 3}},
};
constexpr std::size_t kMostRanks = kSanitized ? 3 : 4;  // as in add_for_sizes()

bool on_all_layouts(const std::string& name, const std::function<void(Rank&)>& fn,
                    std::size_t smallest = 1) {
  for (const Layout& layout : kLayouts) {
    if (layout.host_of.size() < smallest || layout.host_of.size() > kMostRanks) continue;
    add_test(std::string("engine, ") + layout.name + ": " + name,
             [=] { run_engines(layout.host_of, fn); });
  }
  return true;
}

const bool kBlocking = on_all_layouts("awaited requests of many sizes", [](Rank& rank) {
  for (const std::size_t count : {1u, 100u, 1000u, 5000u, 100'000u, 700'001u}) {
    std::vector<float> values = rank.input(count);
    rank.wait(rank.allreduce(values, "", Engine::Mode::kAwaited));
    CHECK(values == Rank::sums(count, rank.size()));
  }
});

const bool kAnyOrder = on_all_layouts("any order of submission, matched by name", [](Rank& rank) {
  constexpr int kRequests = 40;
  for (int repeat = 0; repeat < (kSanitized ? 2 : 5); ++repeat) {
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
      // Rank 0 has both in flight; the others submit the second only when the first is done, and
      // the first is what rank 0 submitted last.
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

const bool kNobodyWaits = on_all_layouts("works complete though nobody waits", [](Rank& rank) {
  std::vector<float> values = rank.input(1000);
  const auto work = rank.allreduce(values, "alone");
  while (!work->done()) std::this_thread::yield();
  CHECK(values == Rank::sums(1000, rank.size()));
});

const bool kThreads = on_all_layouts("several threads of a rank wait at once", [](Rank& rank) {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        std::vector<float> values = rank.input(64);
        rank.wait(rank.allreduce(values, std::to_string(t) + "." + std::to_string(i),
                                 Engine::Mode::kAwaited));
        right += values == Rank::sums(64, rank.size());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(right.load(), 80);
});

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

const bool kDuplicate = on_all_layouts("a name twice in flight is refused", [](Rank& rank) {
  std::vector<float> first = rank.input(5);
  std::vector<float> second = first;
  std::vector<float> gate(1, 1.0f);
  const auto work = rank.allreduce(first, "twice", Engine::Mode::kAwaited);  // nobody starts it
  CHECK_THROWS(rank.allreduce(second, "twice", Engine::Mode::kAwaited), ErrorKind::kInvalidArgument,
               "'twice' float32 [5] Sum is in flight already");
  rank.wait(work);
  rank.wait(rank.allreduce(second, "twice"));
  CHECK(second == Rank::sums(5, rank.size()));
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

const bool kInterrupt = on_all_layouts(
    "an interrupt ends a wait and not the work",
    [](Rank& rank) {
      struct Stop : std::runtime_error {
        Stop() : std::runtime_error("stop") {}
      };
      std::vector<float> values = rank.input(9);
      std::shared_ptr<Work> work;
      if (rank.rank() == 0) {
        work = rank.allreduce(values, "slow");
        bool stopped = false;
        try {
          rank.engine().wait(*work, [] { throw Stop(); });
        } catch (const Stop&) {
          stopped = true;
        }
        CHECK(stopped);
        std::vector<float> gate(1);
        rank.wait(rank.allreduce(gate, "gate"));
      } else {
        std::vector<float> gate(1);
        rank.wait(rank.allreduce(gate, "gate"));
        work = rank.allreduce(values, "slow");
      }
      rank.wait(work);
      CHECK(values == Rank::sums(9, rank.size()));
    },
    2);

TEST(a_silent_rank_is_a_timeout_that_says_what_it_does) {
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(400);
  config.stall_warning = std::chrono::milliseconds(100);
  std::latch done(2);
  run_engines(
      {0, 0, 0},
      [&](Rank& rank) {
        if (rank.rank() == 2) {
          done.wait();
          std::vector<float> values(3);
          CHECK_THROWS(rank.wait(rank.allreduce(values, "late")), ErrorKind::kTimeout, "rank");
          return;
        }
        std::vector<float> values(3);
        CHECK_THROWS(rank.wait(rank.allreduce(values, "x")), ErrorKind::kTimeout,
                     "rank 2 (a thread) has not submitted it");
        CHECK(rank.log().find("for allreduce 'x' float32 [3] Sum: rank 2") != std::string::npos);
        done.count_down();
      },
      config);
}

TEST(after_a_fatal_error_everything_fails_with_its_cause) {
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(200);
  run_engines(
      {0, 1},
      [&](Rank& rank) {
        std::vector<float> values(3);
        const std::string name = rank.rank() == 0 ? "a" : "b";
        const auto work = rank.allreduce(values, name);
        while (!work->done()) std::this_thread::yield();
        CHECK_THROWS(rank.wait(work), ErrorKind::kTimeout, "has not submitted it");
        CHECK_THROWS(rank.allreduce(values, "later"), ErrorKind::kTimeout, "has not submitted it");
      },
      config);
}

TEST(a_closed_engine_fails_what_is_pending) {
  run_engines({0, 0}, [](Rank& rank) {
    std::vector<float> values(3);
    std::vector<float> other(3);
    const auto work = rank.allreduce(values, rank.rank() == 0 ? "a" : "b");
    rank.engine().close();
    CHECK_THROWS(rank.wait(work), ErrorKind::kInternal, "shut down");
    CHECK_THROWS(rank.allreduce(other, "later"), ErrorKind::kInternal, "shut down");
  });
}

TEST(a_silent_process_is_missed_by_its_heartbeats) {
  // A peer whose socket is open and says nothing: what SIGSTOP and a cut link look like.
  auto [ours, theirs] = unix_pair();
  std::vector<Fd> control(2);
  control[1] = std::move(ours);
  Abort abort;
  std::atomic<bool> raised{false};
  Watchdog watchdog(0, std::move(control), {"rank 0", "rank 1 (pid 7)"},
                    std::chrono::milliseconds(200), abort, [&] { raised = true; });
  while (!raised) std::this_thread::yield();
  CHECK_THROWS(abort.check(), ErrorKind::kPeerLost, "rank 1 (pid 7) has not been heard for 0.2");
}

TEST(a_dead_process_is_noticed_by_its_connection) {
  auto [ours, theirs] = unix_pair();
  std::vector<Fd> control(2);
  control[1] = std::move(ours);
  Abort abort;
  std::atomic<bool> raised{false};
  Watchdog watchdog(0, std::move(control), {"rank 0", "rank 1 (pid 7)"}, std::chrono::minutes(1),
                    abort, [&] { raised = true; });
  theirs.reset();
  while (!raised) std::this_thread::yield();
  CHECK_THROWS(abort.check(), ErrorKind::kPeerLost, "rank 1 (pid 7) died");
}

/// A request that is answered by ranks' rows, and the bytes that came.
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

const bool kAlltoall = on_all_layouts("alltoall, small and large", [](Rank& rank) {
  for (const std::int64_t unit : {1, 30'000}) {
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
                                   Engine::Mode::kAwaited));
    CHECK_EQ(ragged.rows, splits);
    CHECK(ragged.output == expected);
  }
});

const bool kReducescatter = on_all_layouts("reducescatter, small and large", [](Rank& rank) {
  for (const std::int64_t row : {1, 20'000}) {
    const std::int64_t rows = 2 * rank.size() + 1;  // the first rank gets three
    const auto shares = scattered_rows(rows, rank.size());
    const auto begin =
        row * std::accumulate(shares.begin(), shares.begin() + rank.rank(), std::int64_t{0});
    const std::vector<float> input = rank.input(static_cast<std::size_t>(rows * row));
    std::vector<float> output(
        static_cast<std::size_t>(row * shares[static_cast<std::size_t>(rank.rank())]));
    Request request;
    request.fingerprint.collective = Collective::kReducescatter;
    request.fingerprint.shape = {rows, row};
    request.input = input.data();
    request.output = output.data();
    rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kAwaited));
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
  rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kAwaited));
  return last;
}

const bool kJoin = on_all_layouts("ranks join one after the other, twice", [](Rank& rank) {
  for (int repeat = 0; repeat < 2; ++repeat) {
    // Rank r has r + 1 steps, so that in step i the ranks from i on give ones, the others nothing.
    for (int step = 0; step <= rank.rank(); ++step) {
      for (const std::size_t count : {7u, 50'000u}) {
        std::vector<float> ones(count, 1.0f);
        rank.wait(rank.allreduce(ones, "", Engine::Mode::kAwaited));
        CHECK(ones == std::vector<float>(count, static_cast<float>(rank.size() - step)));
      }
    }
    CHECK_EQ(join(rank), rank.size() - 1);
  }
});

const bool kJoinable = on_all_layouts(
    "a joinable allgather leaves out who has joined, others fail and the job goes on",
    [](Rank& rank) {
      if (rank.rank() > 0) {
        const std::vector<std::int32_t> input(3, rank.rank());
        Ragged ragged;
        Request request = ragged.request(Collective::kAllgather, input, {3});
        request.fingerprint.joinable = true;
        rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kAwaited));
        CHECK_EQ(ragged.output.size(), static_cast<std::size_t>(3 * (rank.size() - 1)));
        CHECK_EQ(ragged.rows[0], 0);
        const auto work = rank.engine().submit(ragged.request(Collective::kAllgather, input, {3}),
                                               Engine::Mode::kAwaited);
        CHECK_THROWS(rank.wait(work), ErrorKind::kMismatch, "called join(): rank 0");
      }
      join(rank);
      std::vector<float> values = rank.input(5);
      rank.wait(rank.allreduce(values, "", Engine::Mode::kAwaited));
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
      rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kAwaited));
      std::vector<float> values = rank.input(5);
      rank.wait(rank.allreduce(values, "", Engine::Mode::kAwaited));
      CHECK(values == Rank::sums(5, rank.size()));
    },
    2);

const bool kGroups = on_all_layouts("a group is submitted whole or not at all", [](Rank& rank) {
  std::vector<float> values(3, 1.0f);
  const auto request = [&](const std::string& name) {
    Request request;
    request.fingerprint.name = name;
    request.fingerprint.shape = {3};
    request.input = request.output = values.data();
    return request;
  };
  const auto mode = Engine::Mode::kAwaited;
  CHECK_THROWS(rank.engine().submit({request("a"), request("b"), request("a")}, mode),
               ErrorKind::kInvalidArgument, "in flight already");
  for (const auto& work : rank.engine().submit({request("a"), request("b")}, mode)) {
    rank.wait(work);
  }
});

}  // namespace
}  // namespace torch_ring::test
