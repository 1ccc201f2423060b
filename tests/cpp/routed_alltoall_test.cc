// SPDX-License-Identifier: Apache-2.0
#include "collective/routed_alltoall.h"

#include <algorithm>
#include <set>

#include "core/at.h"
#include "harness.h"

namespace torch_ring::test::routed_alltoall_test {

namespace {

std::size_t as_count(int value) { return static_cast<std::size_t>(value); }

struct Hosts {
  std::vector<std::vector<int>> ranks;
  int lanes;
};
const std::vector<Hosts> kHosts{
    {{{0, 1}, {2}}, 1}, {{{0, 2}, {1, 3}}, 2}, {{{0, 3, 4, 5, 8}, {1, 2}, {6, 7, 9}}, 2}};

/// A matrix with empty parts, and no two equal sums.
std::vector<std::size_t> matrix_of(int size) {
  std::vector<std::size_t> bytes;
  for (int i = 0; i < size * size; ++i) {
    bytes.push_back(i % 3 == 0 ? 0 : as_count(1000 + i * i));
  }
  return bytes;
}

/// The parts at bytes [begin, begin + bytes) of consecutive parts.
std::vector<Part> cut(const std::vector<Part>& parts, std::size_t begin, std::size_t bytes) {
  std::vector<Part> found;
  std::size_t next = 0;
  for (const Part& part : parts) {
    if (next >= begin && next < begin + bytes) found.push_back(part);
    next += part.bytes;
  }
  return found;
}

}  // namespace

TEST(alltoall_hop_stays_in_a_host_or_a_lane) {
  const Routes routes{{{0, 3, 4}, {1, 2}}, 2};
  CHECK_EQ(routes.members(4, 1), (std::vector{0, 3, 4}));
  CHECK_EQ(routes.members(3, 2), (std::vector{3, 2}));
  CHECK(routes.members(4, 2).empty());
  for (int from = 0; from < 5; ++from) {
    for (int to = 0; to < 5; ++to) {
      CHECK_EQ(routes.holder(from, to, 0), from);
      CHECK_EQ(routes.holder(from, to, Routes::kHops), to);
      for (int hop = 1; hop <= Routes::kHops; ++hop) {
        const auto members = routes.members(routes.holder(from, to, hop - 1), hop);
        CHECK(std::count(members.begin(), members.end(), routes.holder(from, to, hop)) == 1);
      }
    }
  }
}

// Simulates all ranks: each rank unpacks the parts that its peers packed for it, and has all its
// parts after the last hop.
TEST(alltoall_hops_deliver_every_part_to_its_receiver) {
  for (const Hosts& hosts : kHosts) {
    const Routes routes(hosts.ranks, hosts.lanes);
    const int size = routes.size();
    const std::vector<std::size_t> bytes = matrix_of(size);
    std::vector<std::set<Part>> held(as_count(size));
    for (int i = 0; i < size * size; ++i) {
      if (at(bytes, i) > 0) at(held, i / size).insert({i / size, i % size, at(bytes, i)});
    }
    for (int hop = 1; hop <= Routes::kHops; ++hop) {
      for (int rank = 0; rank < size; ++rank) {
        const std::vector<int> members = routes.members(rank, hop);
        const Hop plan = plan_hop(routes, rank, hop, bytes);
        for (const Part& part : plan.sent) CHECK(at(held, rank).contains(part));
        const auto own = static_cast<std::size_t>(std::find(members.begin(), members.end(), rank) -
                                                  members.begin());
        CHECK(members.empty() || plan.bytes[own * (members.size() + 1)] == 0);  // the diagonal
        std::size_t sent = 0;
        for (std::size_t peer = 0; peer < members.size(); ++peer) {
          const Hop theirs = plan_hop(routes, members[peer], hop, bytes);
          CHECK_EQ(plan.bytes, theirs.bytes);
          std::size_t received = 0;  // bytes from members before this rank
          for (std::size_t i = 0; i < own; ++i) received += plan.bytes[i * members.size() + peer];
          const std::size_t part = plan.bytes[own * members.size() + peer];
          CHECK(cut(plan.sent, sent, part) == cut(theirs.received, received, part));
          sent += part;
        }
      }
      for (int rank = 0; rank < size; ++rank) {
        const Hop plan = plan_hop(routes, rank, hop, bytes);
        for (const Part& part : plan.sent) at(held, rank).erase(part);
        at(held, rank).insert(plan.received.begin(), plan.received.end());
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      for (int from = 0; from < size; ++from) {
        const std::size_t part = at(bytes, from * size + rank);
        CHECK_EQ(at(held, rank).contains({from, rank, part}), part > 0);
      }
    }
  }
}

}  // namespace torch_ring::test::routed_alltoall_test
