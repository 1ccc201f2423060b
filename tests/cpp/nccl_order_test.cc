// SPDX-License-Identifier: Apache-2.0
// Overlapping process sets on stand-ins for GPUs that run one operation of NCCL at a time: all
// ranks must enqueue the operations of all sets in one order.
#include <latch>
#include <random>
#include <thread>

#include "set_ranks.h"

namespace torch_ring::test::nccl_order_test {
namespace {

using std::chrono::milliseconds;

/// Long enough for a device to run its work, unless it waits for ever.
constexpr milliseconds kLong{200};

const Sets kTwins{{0, 1}, {0, 1}};

/// From now on the sets' communicators exist, and are connected for sums.
void connect(SetRank& rank) {
  for (const std::size_t set : {0, 1}) {
    rank.engine(set).wait(*rank.sum(set, "warm", rank.tensor()), {});
    rank.synchronize();
  }
}

/// Lets two sets of the same ranks enqueue a sum each. Rank 0 delays the sum of the first set until
/// the other one's is enqueued, rank 1 the other way round; for at most `patience`.
std::vector<std::vector<float>*> cross(SetRank& rank, milliseconds patience) {
  connect(rank);
  const std::size_t last = rank.rank() == 0 ? 0 : 1;
  const std::vector<std::vector<float>*> values{&rank.tensor(), &rank.tensor()};
  std::vector<std::shared_ptr<Work>> works(2);
  works[1 - last] = rank.sum(1 - last, "crossing", *values[1 - last]);
  const auto hold = [first = works[1 - last], patience] {
    const auto deadline = Clock::now() + patience;
    while (!first->done() && Clock::now() < deadline) std::this_thread::yield();
  };
  works[last] = rank.sum(last, "crossing", *values[last], hold);
  for (std::size_t set = 0; set < 2; ++set) rank.engine(set).wait(*works[set], {});
  return values;
}

TEST(sets_that_enqueue_in_no_order_wait_for_ever_until_one_is_given_up) {
  std::latch looked(2);
  run_sets(
      2, kTwins,
      [&](SetRank& rank) {
        const auto values = cross(rank, std::chrono::seconds(20));
        std::this_thread::sleep_for(kLong);
        for (const std::size_t set : {0, 1}) CHECK_EQ(rank.ran(set), 1);  // the warm one
        looked.arrive_and_wait();
        SetRank::end(rank.engine(0));
        wait_until([&] { return rank.ran(0) == 2 && rank.ran(1) == 2; }, "no device waits");
        CHECK_EQ(*values[1], std::vector<float>(5, 2.0f));
      },
      false);
}

TEST(sets_enqueue_in_one_order_on_all_ranks) {
  run_sets(2, kTwins, [](SetRank& rank) {
    const auto values = cross(rank, kLong);
    rank.synchronize();
    for (const auto* sums : values) CHECK_EQ(*sums, std::vector<float>(5, 2.0f));
  });
}

TEST(set_that_ends_in_its_turn_holds_up_no_other) {
  std::latch submitted(2);
  std::atomic<bool> ended{false};
  run_sets(2, kTwins, [&](SetRank& rank) {
    connect(rank);
    std::vector<float>& sums = rank.tensor();
    const auto hold = [&] {
      if (rank.rank() == 1) return;
      while (!ended) std::this_thread::yield();
      throw Error(ErrorKind::kInternal, "ended in its turn");
    };
    const auto held = rank.sum(0, "held", rank.tensor(), hold);
    const auto other = rank.sum(1, "other", sums);
    submitted.arrive_and_wait();
    std::this_thread::sleep_for(kLong);  // rank 0's set 0 may have its turn
    if (rank.rank() == 1) {
      SetRank::end(rank.engine(0));
      ended = true;
    }
    rank.engine(1).wait(*other, {});
    wait_until([&] { return rank.ran(1) == 2; }, "the other set's sum has run");
    CHECK_EQ(sums, std::vector<float>(5, 2.0f));
    wait_until([&] { return held->done(); }, "the sum that was held is done");
    CHECK_EQ(held->failed(), rank.rank() == 0);
    if (rank.rank() == 1) {  // it was enqueued in vain
      wait_until([&] { return rank.ran(0) == 2; }, "the device has given up");
    }
  });
}

TEST(joined_rank_takes_part_in_the_order) {
  run_sets(3, {{0, 1, 2}, {0, 1}, {1, 2}}, [](SetRank& rank) {
    constexpr std::size_t kSums = 6;
    std::vector<const std::vector<float>*> sums;  // each of two ranks' tensors
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < kSums; ++i) {
      for (std::size_t set = 0; set < 3; ++set) {
        if (!rank.is_in(set) || (set == 0 && rank.rank() == 2)) continue;
        std::vector<float>& tensor = rank.tensor();
        works.push_back(rank.sum(set, std::to_string(i), tensor));
        sums.push_back(&tensor);
      }
    }
    std::int64_t last = -1;
    Request join;
    join.fingerprint.collective = Collective::kJoin;
    join.fingerprint.name = kJoinKey;
    join.output = &last;
    rank.engine(0).wait(*rank.engine(0).submit(std::move(join), Engine::Mode::kBlocking), {});
    wait_until([&] { return std::ranges::all_of(works, [](auto& work) { return work->done(); }); },
               "all sums are enqueued");
    rank.synchronize();
    for (const auto* sum : sums) CHECK_EQ(*sum, std::vector<float>(5, 2.0f));
  });
}

/// Sums of sets, in phases: all ranks finish one before they begin the next.
struct Sum {
  std::size_t set;
  std::string name;
  std::size_t count;
  bool on_device;
};
using Phase = std::vector<Sum>;

Phase random_phase(std::mt19937& random, const Sets& sets, const std::string& name) {
  Phase phase(1 + random() % 8);
  for (std::size_t i = 0; i < phase.size(); ++i) {
    phase[i] = {random() % sets.size(), name + std::to_string(i), 1 + random() % 500,
                random() % 4 > 0};
  }
  return phase;
}

/// Submits this rank's sums of a phase in a random order, and waits for them in another one.
void run_phase(SetRank& rank, const Sets& sets, Phase phase, std::mt19937& random) {
  std::erase_if(phase, [&](const Sum& sum) { return !rank.is_in(sum.set); });
  std::ranges::shuffle(phase, random);
  std::vector<std::vector<float>*> values;
  for (const Sum& sum : phase) {
    values.push_back(&rank.tensor(sum.count, static_cast<float>(1 + rank.rank())));
  }
  std::vector<std::pair<std::shared_ptr<Work>, std::size_t>> works;
  for (std::size_t i = 0; i < phase.size(); ++i) {
    const auto& [set, name, count, on_device] = phase[i];
    works.emplace_back(
        on_device ? rank.sum(set, name, *values[i]) : rank.sum_here(set, name, *values[i]), set);
    if (random() % 4 == 0) std::this_thread::yield();
  }
  std::ranges::shuffle(works, random);
  for (const auto& [work, set] : works) rank.engine(set).wait(*work, {});
  rank.synchronize();
  for (std::size_t i = 0; i < phase.size(); ++i) {
    float expected = 0;
    for (const int member : sets[phase[i].set]) expected += static_cast<float>(1 + member);
    CHECK_EQ(*values[i], std::vector<float>(phase[i].count, expected));
  }
}

/// Twenty programs of up to three phases each.
void run_programs(int size, const Sets& sets, unsigned seed) {
  run_sets(size, sets, [&](SetRank& rank) {
    std::mt19937 everywhere(seed);
    std::mt19937 here(seed * 31 + static_cast<unsigned>(rank.rank()));
    for (int program = 0; program < 20; ++program) {
      const std::size_t phases = 1 + everywhere() % 3;
      for (std::size_t phase = 0; phase < phases; ++phase) {
        const std::string name = std::to_string(program) + "." + std::to_string(phase) + ".";
        run_phase(rank, sets, random_phase(everywhere, sets, name), here);
      }
    }
  });
}

TEST(random_programs_on_sets_in_a_circle) {
  for (unsigned seed = 0; seed < 3; ++seed) run_programs(3, {{0, 1}, {1, 2}, {0, 2}}, seed);
}

TEST(random_programs_on_random_sets) {
  for (unsigned seed = 5; seed < 10; ++seed) {
    std::mt19937 random(seed);
    const int size = kSanitized ? 3 : 3 + static_cast<int>(random() % 2);
    Sets sets;
    while (sets.size() < 2 + seed % 3) {
      std::vector<int> members;
      for (int rank = 0; rank < size; ++rank) {
        if (random() % 3 > 0) members.push_back(rank);
      }
      if (members.size() > 1) sets.push_back(std::move(members));
    }
    run_programs(size, sets, seed);
  }
}

}  // namespace
}  // namespace torch_ring::test::nccl_order_test
