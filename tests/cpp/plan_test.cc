#include "collective/plan.h"

#include <array>
#include <bit>
#include <cstdint>
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

TEST(plan_arcs_are_two_ranges_of_elements) {
  const std::array<std::size_t, 4> counts{5, 6, 0, 7};
  const std::vector<Range> chunks = ranges_of(counts);
  const auto check = [&](int first, int count, Range one, Range other) {
    const auto arc = arc_of(chunks, first, count);
    CHECK_EQ(arc[0].begin, one.begin);
    CHECK_EQ(arc[0].count, one.count);
    CHECK_EQ(arc[1].begin, other.begin);
    CHECK_EQ(arc[1].count, other.count);
  };
  check(1, 3, {5, 13}, {0, 0});
  check(1, 0, {0, 0}, {0, 0});
  check(2, 1, {11, 0}, {0, 0});
  check(3, 3, {11, 7}, {0, 11});
  check(0, 4, {0, 18}, {0, 0});
}

// Simulates halving_steps() and then bruck_steps(). A value has a bit for each rank whose value it
// contains, and a sum whose last bits depend on the order of the additions.
TEST(plan_halving_and_doubling_reduce_each_rank_once_to_the_same_bits) {
  struct Value {
    std::uint64_t ranks;
    float sum;
  };
  for (int size = 1; size <= 64; ++size) {
    std::vector<std::vector<Value>> ranks(as_count(size));
    for (int rank = 0; rank < size; ++rank) {
      const float value = 1.0f / static_cast<float>(3 + rank);
      at(ranks, rank).assign(as_count(size), {std::uint64_t{1} << rank, value});
    }
    for (std::size_t step = 0; step < halving_steps(0, size).size(); ++step) {
      const auto before = ranks;
      for (int rank = 0; rank < size; ++rank) {
        const BruckStep ours = halving_steps(rank, size)[step];
        const BruckStep theirs = halving_steps(ours.from, size)[step];
        CHECK_EQ(theirs.to, rank);
        CHECK_EQ(theirs.count, ours.count);
        for (int i = 0; i < ours.count; ++i) {
          const int chunk = (rank + i) % size;
          const Value arrived = at(at(before, ours.from), chunk);
          Value& own = at(at(ranks, rank), chunk);
          CHECK_EQ(own.ranks & arrived.ranks, 0u);
          own = {own.ranks | arrived.ranks, own.sum + arrived.sum};
        }
      }
    }
    std::vector<Value> results;
    for (int rank = 0; rank < size; ++rank) results.push_back(at(at(ranks, rank), rank));
    for (const Value& result : results) CHECK_EQ(std::popcount(result.ranks), size);

    for (std::size_t step = 0; step < bruck_steps(0, size).size(); ++step) {
      const auto before = ranks;
      for (int rank = 0; rank < size; ++rank) {
        const BruckStep ours = bruck_steps(rank, size)[step];
        for (int i = 0; i < ours.count; ++i) {
          const int chunk = (ours.from + i) % size;
          at(at(ranks, rank), chunk) = at(at(before, ours.from), chunk);
        }
      }
    }
    for (const auto& values : ranks) {
      for (int chunk = 0; chunk < size; ++chunk) {
        CHECK(std::bit_cast<std::uint32_t>(at(values, chunk).sum) ==
              std::bit_cast<std::uint32_t>(at(results, chunk).sum));
      }
    }
  }
}

TEST(plan_halving_takes_the_fewest_steps_and_chunks_among_many_ranks) {
  for (const auto& [size, wanted] : {std::pair{4096, 12u}, {4097, 13u}, {5000, 13u}, {8192, 13u}}) {
    for (const int rank : {0, 1, size / 2, size - 1}) {
      const auto steps = halving_steps(rank, size);
      CHECK_EQ(steps.size(), wanted);
      int sent = 0;
      for (const BruckStep& step : steps) {
        sent += step.count;
        // No chunk that is sent away is one that arrives.
        CHECK((step.to - rank + size) % size >= step.count);
        CHECK((step.to - rank + size) % size + step.count <= size);
      }
      CHECK_EQ(sent, size - 1);
    }
  }
}

namespace {

/// Checks the tree from `rank` down, which received its data in step `step` as `edge`.
void check_subtree(int rank, int size, int root, const TreeEdge& edge, unsigned step) {
  const Tree tree = binomial_tree(rank, size, root);
  CHECK_EQ((root + edge.first) % size, rank);
  int end = edge.first + edge.count;
  for (const TreeEdge& child : tree.children) {  // they share what lies beyond the own chunk
    CHECK_EQ(child.first + child.count, end);
    end = child.first;
    const Tree below = binomial_tree(child.peer, size, root);
    CHECK(below.parent.has_value());
    CHECK_EQ(below.parent->peer, rank);
    CHECK_EQ(below.parent->first, child.first);
    CHECK_EQ(below.parent->count, child.count);
    CHECK(std::has_single_bit(static_cast<unsigned>((child.peer - rank + size) % size)));
    check_subtree(child.peer, size, root, child, ++step);
  }
  CHECK_EQ(end, edge.first + 1);
  CHECK(step <= static_cast<unsigned>(std::bit_width(static_cast<unsigned>(size - 1))));
}

}  // namespace

TEST(plan_tree_reaches_every_rank_once_in_log_steps) {
  for (int size = 1; size <= 64; ++size) {
    for (int root = 0; root < size; ++root) {
      CHECK(!binomial_tree(root, size, root).parent);
      check_subtree(root, size, root, {root, 0, size}, 0);
    }
  }
  check_subtree(17, 4096, 17, {17, 0, 4096}, 0);
  CHECK_EQ(binomial_tree(17, 4096, 17).children.size(), 12u);
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
