#include "collective/plan.h"

#include <array>
#include <set>

#include "core/at.h"
#include "harness.h"

using namespace torch_ring;
using namespace torch_ring::test;

namespace {

constexpr int kLargest = 17;

std::size_t as_count(int value) { return static_cast<std::size_t>(value); }

}  // namespace

TEST(plan_chunks_cover_the_buffer_in_order) {
  for (int parts = 1; parts <= kLargest; ++parts) {
    for (const std::size_t count : {0, 1, 63, 64, 65, 64 * parts, 64 * parts + 1, 12345}) {
      std::size_t end = 0;
      for (int i = 0; i < parts; ++i) {
        const Range chunk = chunk_of(count, parts, i);
        CHECK_EQ(chunk.begin, end);
        CHECK(end % 64 == 0 || chunk.count == 0);
        end += chunk.count;
      }
      CHECK_EQ(end, count);
    }
  }
}

TEST(plan_ranges_cover_the_count) {
  CHECK(ranges_of(0, 10).empty());
  const auto ranges = ranges_of(25, 10);
  CHECK_EQ(ranges.size(), 3u);
  CHECK_EQ(ranges[2].begin, 20u);
  CHECK_EQ(ranges[2].count, 5u);
  CHECK_EQ(ranges_of(20, 10).size(), 2u);

  const std::array<std::size_t, 3> ragged{4, 0, 6};
  const auto parts = ranges_of(ragged);
  CHECK_EQ(parts[1].begin, 4u);
  CHECK_EQ(parts[1].count, 0u);
  CHECK_EQ(parts[2].begin, 4u);
  CHECK_EQ(parts[2].count, 6u);
}

// Simulates the ring: each rank has, for every chunk, the set of ranks whose values it contains. A
// step adds the previous rank's set of the chunk that it sends.
TEST(plan_reduce_scatter_sums_each_rank_once) {
  for (int size = 1; size <= kLargest; ++size) {
    using Sums = std::vector<std::multiset<int>>;
    std::vector<Sums> ranks(as_count(size));
    for (int rank = 0; rank < size; ++rank) at(ranks, rank).assign(as_count(size), {rank});
    for (int step = 0; step < size - 1; ++step) {
      const std::vector<Sums> before = ranks;
      for (int rank = 0; rank < size; ++rank) {
        const int prev = (rank + size - 1) % size;
        const int chunk = at(reduce_scatter_steps(rank, size), step).receive;
        CHECK_EQ(chunk, at(reduce_scatter_steps(prev, size), step).send);
        const auto& sum = at(at(before, prev), chunk);
        at(at(ranks, rank), chunk).insert(sum.begin(), sum.end());
      }
    }
    std::multiset<int> everybody;
    for (int rank = 0; rank < size; ++rank) everybody.insert(rank);
    for (int rank = 0; rank < size; ++rank) CHECK_EQ(at(at(ranks, rank), rank), everybody);
  }
}

TEST(plan_allgather_sends_only_chunks_received_before) {
  for (int size = 1; size <= kLargest; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      std::set<int> has{rank};
      const auto steps = allgather_steps(rank, size);
      const auto sent_to_us = allgather_steps((rank + size - 1) % size, size);
      for (std::size_t i = 0; i < steps.size(); ++i) {
        CHECK(has.contains(steps[i].send));
        CHECK_EQ(steps[i].receive, sent_to_us[i].send);
        CHECK(has.insert(steps[i].receive).second);
      }
      CHECK_EQ(has.size(), as_count(size));
    }
  }
}

TEST(plan_bruck_receives_every_entry_once_from_distinct_ranks) {
  for (int size = 1; size <= kLargest; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = bruck_steps(rank, size);
      std::set<int> sources;
      int held = 1;
      for (std::size_t i = 0; i < steps.size(); ++i) {
        CHECK_EQ(steps[i].from, (rank + held) % size);  // whose entry is the next one
        CHECK(steps[i].count <= held);                  // ranks send entries that they have
        CHECK_EQ(bruck_steps(steps[i].from, size)[i].to, rank);
        CHECK_EQ(bruck_steps(steps[i].from, size)[i].count, steps[i].count);
        CHECK(sources.insert(steps[i].from).second);
        held += steps[i].count;
      }
      CHECK_EQ(held, size);
    }
  }
  CHECK_EQ(bruck_steps(0, 1 << 14).size(), 14u);  // one less than Doorbell polls
}

TEST(rotated_ranges_begin_with_the_next_rank_and_skip_the_own) {
  const std::vector<std::size_t> counts{5, 6, 7};
  const auto ranges = rotated_ranges(counts, 1);
  CHECK_EQ(ranges[2].begin, 0u);
  CHECK_EQ(ranges[2].count, 7u);
  CHECK_EQ(ranges[0].begin, 7u);
  CHECK_EQ(ranges[0].count, 5u);
  CHECK_EQ(ranges[1].count, 0u);
}
