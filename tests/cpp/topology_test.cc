// SPDX-License-Identifier: Apache-2.0
#include "collective/world.h"
#include "harness.h"

namespace torch_ring::test::topology_test {
namespace {

using Ranks = std::vector<int>;

TEST(topology_lists_the_ranks_of_each_host) {
  const Topology topology{3, {0, 1, 0, 1, 2}};
  CHECK_EQ(topology.size(), 5);
  CHECK_EQ(topology.host(), 1);
  CHECK_EQ(topology.host_count(), 3);
  CHECK_EQ(topology.ranks_of_host(0), (Ranks{0, 2}));
  CHECK_EQ(topology.hosts(), (std::vector<Ranks>{{0, 2}, {1, 3}, {4}}));
}

TEST(topology_has_as_many_lanes_as_the_smallest_host_has_ranks) {
  CHECK_EQ((Topology{0, {0, 0, 0, 1, 1}}.lanes()), 2);
  CHECK_EQ((Topology{0, {0, 0, 1}}.lanes()), 1);
  CHECK_EQ((Topology{0, {0, 0, 0}}.lanes()), 3);
}

}  // namespace
}  // namespace torch_ring::test::topology_test
