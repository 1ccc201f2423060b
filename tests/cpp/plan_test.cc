// SPDX-License-Identifier: Apache-2.0
#include "collective/plan.h"

#include <bit>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/choice.h"
#include "core/at.h"
#include "harness.h"

namespace torch_ring::test::plan_test {
namespace {

constexpr int kLargest = 17;

std::size_t as_count(int value) { return static_cast<std::size_t>(value); }

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

// Simulates a reduce-scatter: each rank has, for every chunk, the order in which the ranks' values
// were added. It must be that of sections_of(), for every chunk.
TEST(plan_scatter_levels_add_each_rank_once_in_the_same_order_for_every_chunk) {
  const std::function<std::string(std::vector<std::string>)> sum_of =
      [&](const std::vector<std::string>& values) -> std::string {
    if (values.size() == 1) return values.front();
    std::vector<std::string> sums;
    for (const auto& section : sections_of(static_cast<int>(values.size()))) {
      std::string sum = "(";
      for (const int index : section) sum += at(values, index) + " ";
      sums.push_back(sum + ")");
    }
    return sums.size() == 1 ? sums.front() : sum_of(sums);
  };
  for (const int size : {1, 2, 3, 5, 16, 17, 18, 19, 33, 50, 272}) {
    std::vector<std::string> own;
    for (int rank = 0; rank < size; ++rank) own.push_back(std::to_string(rank));
    std::vector<std::vector<std::string>> ranks;  // each rank's values, by chunk
    for (int rank = 0; rank < size; ++rank) ranks.emplace_back(as_count(size), at(own, rank));
    for (std::size_t step = 0; step < scatter_levels(0, size).size(); ++step) {
      const auto before = ranks;
      for (int rank = 0; rank < size; ++rank) {
        const auto levels = scatter_levels(rank, size);
        if (step >= levels.size()) continue;
        const ScatterLevel& level = levels[step];
        CHECK_EQ(at(level.section, level.index), rank);
        for (const int peer : level.section) {  // all know the same
          CHECK(scatter_levels(peer, size)[step].section == level.section);
          CHECK_EQ(scatter_levels(peer, size)[step].first_chunk, level.first_chunk);
        }
        if (level.index >= level.arcs) continue;
        for (int i = 0; i < level.chunks; ++i) {
          const int chunk = level.first_chunk + level.index * level.chunks + i;
          std::string& sum = at(at(ranks, rank), chunk) = "(";
          for (const int peer : level.section) sum += at(at(before, peer), chunk) + " ";
          sum += ")";
        }
      }
    }
    const auto chunks = chunks_by_rank(as_count(64 * size), size);
    const std::string expected = sum_of(own);
    std::size_t end = 0;
    for (int rank = 0; rank < size; ++rank) {
      CHECK_EQ(at(chunks, rank).begin, end);
      end += at(chunks, rank).count;
      if (at(chunks, rank).count > 0) CHECK_EQ(at(at(ranks, rank), rank), expected);
    }
    CHECK_EQ(end, as_count(64 * size));
  }
}

TEST(plan_scatter_levels_are_few_and_send_about_the_fewest_chunks) {
  for (const auto& [size, wanted] :
       {std::pair{2, 1u}, {16, 1u}, {17, 2u}, {256, 2u}, {257, 3u}, {4096, 3u}, {4099, 4u}}) {
    for (const int rank : {0, 1, size / 2}) {
      const auto levels = scatter_levels(rank, size);
      CHECK_EQ(levels.size(), wanted);
      int sent = 0;
      for (const ScatterLevel& level : levels) sent += (level.arcs - 1) * level.chunks;
      CHECK(sent <= size - 1);
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
        CHECK_EQ(steps[i].from, (rank + held) % size);  // the owner of the next entry
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

/// Checks the subtree of `rank`, which received its data in step `step` over `edge`.
void check_subtree(int rank, int size, int root, const TreeEdge& edge, unsigned step) {
  const Tree tree = binomial_tree(rank, size, root);
  CHECK_EQ((root + edge.first) % size, rank);
  int end = edge.first + edge.count;
  for (const TreeEdge& child : tree.children) {  // they share the chunks beyond the own one
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

TEST(choice_of_an_allreduce_and_an_allgather_at_their_boundaries) {
  struct Boundaries {
    int ranks;
    std::size_t scattered;  // an allreduce
    std::size_t ring;       // an allgather
  };
  for (const auto& [ranks, scattered, ring] : {Boundaries{5, 18751, 374999},
                                               {8, 9023, 1371428},
                                               {9, 7671, 1349999},
                                               {16, 3721, 3519999},
                                               {17, 6930, 3506249},
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

}  // namespace
}  // namespace torch_ring::test::plan_test
