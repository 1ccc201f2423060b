// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "control/graph.h"
#include "core/at.h"
#include "harness.h"

namespace torch_ring::test::control_graph_test {
namespace {

std::vector<int> hosts_in_turns(int size, int hosts) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank % hosts);
  return host_of;
}

int log2_ceil(int size) {
  int log = 0;
  while ((1 << log) < size) ++log;
  return log;
}

/// Whether all present ranks can reach one another; also checks symmetry.
bool connected(const Graph& graph, const std::vector<bool>& present) {
  const int size = static_cast<int>(present.size());
  const auto first = static_cast<int>(std::ranges::find(present, true) - present.begin());
  std::vector<bool> reached(present.size(), false);
  std::vector<int> open;
  if (first < size) open.push_back(first);
  while (!open.empty()) {
    const int rank = open.back();
    open.pop_back();
    if (at(reached, rank)) continue;
    at(reached, rank) = true;
    for (const int peer : graph.neighbours(rank, present)) {
      CHECK(at(present, peer));
      CHECK(std::ranges::count(graph.neighbours(peer, present), rank) == 1);
      open.push_back(peer);
    }
  }
  return reached == present;
}

TEST(control_graph_of_few_ranks_is_a_full_mesh) {
  for (const int size : {1, 2, 3, 4, 5}) {
    const Graph graph(hosts_in_turns(size, 2));
    const std::vector<bool> all(static_cast<std::size_t>(size), true);
    for (int rank = 0; rank < size; ++rank) {
      CHECK_EQ(static_cast<int>(graph.neighbours(rank, all).size()), size - 1);
    }
  }
}

TEST(control_graph_orders_ranks_by_host) {
  // The ring: 0 3 6 | 1 4 7 | 2 5.
  const Graph graph(hosts_in_turns(8, 3));
  const std::vector<bool> all(8, true);
  CHECK_EQ(graph.neighbours(3, all), (std::vector<int>{0, 1, 5, 6, 7}));
  std::vector<bool> present(8, true);
  present[6] = present[1] = false;
  CHECK_EQ(graph.gap(3, 1, present).next, 4);
  CHECK_EQ(graph.gap(3, 1, present).absent, (std::vector<int>{6, 1}));
  CHECK_EQ(graph.neighbours(3, present), (std::vector<int>{0, 4, 5, 7}));
}

TEST(control_graph_has_logarithmic_degree) {
  for (const int size : {8, 12, 64, 100, 512, 1000, 4096, 20'000}) {
    const Graph graph(hosts_in_turns(size, 16));
    const std::vector<bool> all(static_cast<std::size_t>(size), true);
    const int step = size > 5000 ? 997 : 1;
    for (int rank = 0; rank < size; rank += step) {
      const auto neighbours = graph.neighbours(rank, all);
      CHECK(static_cast<int>(neighbours.size()) <= 2 * log2_ceil(size) + 2);
      for (const int peer : neighbours) {
        CHECK(std::ranges::count(graph.neighbours(peer, all), rank) == 1);
      }
    }
  }
}

TEST(control_graph_connects_the_survivors_of_any_losses) {
  std::mt19937 random(20);
  for (int round = 0; round < 400; ++round) {
    const int size = 1 + static_cast<int>(random() % (round % 50 == 0 ? 600 : 40));
    const Graph graph(hosts_in_turns(size, 1 + static_cast<int>(random() % 5)));
    std::vector<bool> present(static_cast<std::size_t>(size), true);
    for (int lost = static_cast<int>(random()) % size; lost > 0; --lost) {
      present[random() % present.size()] = false;
    }
    CHECK(connected(graph, present));
    for (int rank = 0; rank < size; ++rank) {
      CHECK(static_cast<int>(graph.neighbours(rank, present).size()) <= 2 * log2_ceil(size) + 2);
    }
  }
}

TEST(neighbourhood_replaces_the_lost_at_once_and_the_departed_later) {
  const std::vector<int> all_but_none{1, 2, 4, 6, 7};
  Neighbourhood neighbourhood(0, std::vector<int>(8, 0));
  const auto now = Clock::now();
  CHECK_EQ(neighbourhood.neighbours(), all_but_none);
  neighbourhood.depart(1, now);
  neighbourhood.depart(2, now);
  CHECK_EQ(neighbourhood.neighbours(), all_but_none);
  CHECK(neighbourhood.next_change() == now + Neighbourhood::kSettle);
  neighbourhood.lose(7);
  CHECK_EQ(neighbourhood.neighbours(), (std::vector<int>{1, 2, 4, 6}));
  neighbourhood.lose(6);
  CHECK_EQ(neighbourhood.neighbours(), (std::vector<int>{1, 2, 4, 5}));
  neighbourhood.settle(now + Neighbourhood::kSettle);
  CHECK_EQ(neighbourhood.neighbours(), (std::vector<int>{3, 4, 5}));
  CHECK(neighbourhood.next_change() == Clock::time_point::max());
  CHECK(neighbourhood.behind_departed(3));   // 1 and 2 have left
  CHECK(!neighbourhood.behind_departed(5));  // 6 and 7 have died
  CHECK(!neighbourhood.behind_departed(4));  // a finger
}

}  // namespace
}  // namespace torch_ring::test::control_graph_test
