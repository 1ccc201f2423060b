// SPDX-License-Identifier: Apache-2.0
#include "collective/choice.h"

#include <array>
#include <utility>
#include <vector>

#include "harness.h"

namespace torch_ring::test::choice_test {

namespace {

using Sizes = std::vector<std::size_t>;

/// Powers of two from a byte to 8 GiB, and their neighbours.
Sizes sizes() {
  Sizes all;
  for (int power = 0; power <= 33; ++power) {
    const std::size_t bytes = std::size_t{1} << power;
    for (const std::size_t near : {bytes - 1, bytes, bytes + 1}) {
      if (near > 0) all.push_back(near);
    }
  }
  return all;
}

/// The first size from which `chosen(bytes)` holds, if it holds for all larger ones.
template <class Chosen>
std::size_t boundary(Chosen&& chosen) {
  std::size_t low = 0;
  std::size_t high = std::size_t{1} << 40;
  while (high - low > 1) {
    const std::size_t middle = low + (high - low) / 2;
    (chosen(middle) ? high : low) = middle;
  }
  return high;
}

constexpr NetworkCost kSameEverywhere{30'000'000, 400, 400, 0};

}  // namespace

TEST(choice_of_few_ranks_depends_on_the_size_alone) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    for (const std::size_t bytes : sizes()) {
      CHECK(choose_allreduce(bytes, ranks) ==
            (bytes <= 65'536 ? AllreducePath::kGathered : AllreducePath::kScattered));
      CHECK(choose_reduce(bytes, ranks) ==
            (ranks == 2 || bytes <= 65'536 ? ReducePath::kDirect : ReducePath::kScattered));
      CHECK(choose_allgather(bytes, ranks) == AllgatherPath::kRing);
      CHECK(choose_broadcast(bytes, ranks) == BroadcastPath::kChain);
    }
  }
}

TEST(choice_of_an_allreduce_goes_from_gathered_to_scattered) {
  for (const int ranks : {5, 6, 7, 8, 9, 16, 33, 64, 100, 128, 4096}) {
    AllreducePath before = AllreducePath::kGathered;
    for (const std::size_t bytes : sizes()) {
      const AllreducePath path = choose_allreduce(bytes, ranks);
      CHECK(path == before || path == AllreducePath::kScattered);
      before = path;
    }
    CHECK(before == AllreducePath::kScattered);
  }
}

TEST(choice_of_a_reduce_goes_from_direct_to_scattered_and_has_the_shortest_time) {
  for (const int ranks : {5, 8, 16, 17, 33, 100, 4096}) {
    ReducePath before = ReducePath::kDirect;
    for (const std::size_t bytes : sizes()) {
      const ReducePath path = choose_reduce(bytes, ranks);
      CHECK(path == before || path == ReducePath::kScattered);
      before = path;
      if (bytes > kGatheredBytes) continue;
      const auto other = path == ReducePath::kDirect ? ReducePath::kScattered : ReducePath::kDirect;
      CHECK(time_ps(path, bytes, ranks, kEthernet) <= time_ps(other, bytes, ranks, kEthernet));
    }
    CHECK(before == ReducePath::kScattered);
  }
}

TEST(choice_of_an_allreduce_and_an_allgather_at_their_boundaries) {
  struct Boundaries {
    int ranks;
    std::size_t scattered;  // an allreduce
    std::size_t ring;       // an allgather
  };
  for (const auto& [ranks, scattered, ring] : {Boundaries{5, 18751, 374999},
                                               {6, 13847, 719999},
                                               {7, 10938, 1049999},
                                               {8, 9023, 1371428},
                                               {9, 7671, 1349999},
                                               {16, 3721, 3519999},
                                               {17, 6930, 3506249},
                                               {64, 1630, 17371428},
                                               {128, 798, 36283464},
                                               {4096, 37, 1225199120}}) {
    CHECK_EQ(boundary([&](std::size_t bytes) {
               return choose_allreduce(bytes, ranks) == AllreducePath::kScattered;
             }),
             scattered);
    CHECK_EQ(boundary([&](std::size_t bytes) {
               return choose_allgather(bytes, ranks) == AllgatherPath::kRing;
             }),
             ring);
  }
}

TEST(choice_of_a_broadcast_goes_from_the_tree_to_scattered_to_the_chain) {
  for (const int ranks : {5, 6, 7, 8, 9, 16, 100, 1024, 4096}) {
    const auto order = [](BroadcastPath path) {
      return path == BroadcastPath::kTree ? 0 : path == BroadcastPath::kScattered ? 1 : 2;
    };
    int before = order(BroadcastPath::kTree);
    for (const std::size_t bytes : sizes()) {
      const int now = order(choose_broadcast(bytes, ranks));
      CHECK(now == before || now == before + 1);
      before = now;
    }
    CHECK_EQ(before, order(BroadcastPath::kChain));
  }
}

TEST(choice_takes_the_shortest_time_and_the_first_of_equal_ones) {
  for (const int ranks : {5, 16, 63, 1024}) {
    for (const std::size_t bytes : sizes()) {
      const AllreducePath chosen = choose_allreduce(bytes, ranks);
      for (const AllreducePath path : {AllreducePath::kGathered, AllreducePath::kScattered}) {
        if (path == AllreducePath::kGathered && bytes > kGatheredBytes) continue;
        CHECK(time_ps(chosen, bytes, ranks, kEthernet) <= time_ps(path, bytes, ranks, kEthernet));
      }
    }
  }
  // Without latency only bytes count, and all are near.
  constexpr NetworkCost kBytesAlone{0, 400, 400, 0};
  CHECK_EQ(time_ps(AllgatherPath::kRing, 1u << 20, 8, kBytesAlone),
           time_ps(AllgatherPath::kDoubling, 1u << 20, 8, kBytesAlone));
  CHECK(choose_allgather(1u << 20, 8, kBytesAlone) == AllgatherPath::kRing);
}

TEST(choice_time_counts_steps_bytes_and_reduction) {
  constexpr std::uint64_t kLatency = kSameEverywhere.latency_ps;
  const auto time = [](AllreducePath path, std::size_t bytes) {
    return time_ps(path, bytes, 8, kSameEverywhere);
  };
  CHECK_EQ(time(AllreducePath::kGathered, 8), 3 * kLatency + 7 * 8 * 400);
  CHECK_EQ(time(AllreducePath::kScattered, 8), kLatency + 3 * kLatency + 2 * 7 * 400);
  CHECK_EQ(time_ps(AllreducePath::kScattered, 17, 17, kSameEverywhere),
           2 * kLatency + 5 * kLatency + 2 * 16 * 400);  // two levels
  constexpr std::size_t kRound = 8 * kChunkBytes;
  CHECK_EQ(time(AllreducePath::kScattered, 2 * kRound),
           2 * time(AllreducePath::kScattered, kRound));
  CHECK_EQ(time_ps(BroadcastPath::kTree, 8, 8, kSameEverywhere), 3 * (kLatency + 8 * 400));
  CHECK_EQ(time_ps(BroadcastPath::kScattered, 8, 8, kSameEverywhere), 6 * kLatency + 2 * 7 * 400);
  CHECK_EQ(time_ps(BroadcastPath::kChain, 8, 8, kSameEverywhere),
           7 * kLatency + 6 * 8 * 400 + 8 * 400);
  CHECK_EQ(time_ps(AllgatherPath::kRing, 8, 8, kSameEverywhere), 7 * kLatency + 7 * 400);
  CHECK_EQ(time_ps(AllgatherPath::kDoubling, 8, 8, kSameEverywhere), 3 * kLatency + 7 * 400);
  constexpr NetworkCost kReductionAlone{0, 0, 0, 1};
  CHECK_EQ(time_ps(AllreducePath::kScattered, 800, 8, kReductionAlone), 800u);
  CHECK_EQ(time_ps(AllreducePath::kGathered, 800, 8, kReductionAlone), 6400u);
}

}  // namespace torch_ring::test::choice_test
