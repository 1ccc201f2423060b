// SPDX-License-Identifier: Apache-2.0
#include "collective/world.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "transport/host_memory.h"

namespace torch_ring {

int Topology::host_count() const { return *std::max_element(host_of.begin(), host_of.end()) + 1; }

std::vector<int> Topology::ranks_of_host(int host) const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (at(host_of, r) == host) ranks.push_back(r);
  }
  return ranks;
}

std::vector<std::vector<int>> Topology::hosts() const {
  std::vector<std::vector<int>> hosts(static_cast<std::size_t>(host_count()));
  for (int r = 0; r < size(); ++r) at(hosts, at(host_of, r)).push_back(r);
  return hosts;
}

int Topology::lanes() const {
  std::size_t smallest = host_of.size();
  for (const auto& ranks : hosts()) smallest = std::min(smallest, ranks.size());
  return static_cast<int>(smallest);
}

void share_host_memory(World& world, Fd memory) {
  const auto host = std::make_shared<const HostMemory>(std::move(memory));
  const std::vector<int> ranks = world.topology.ranks_of_host(world.topology.host());
  if (host->ranks() != static_cast<int>(ranks.size())) {
    throw Error(ErrorKind::kInternal, "the memory of the host is for " +
                                          std::to_string(host->ranks()) + " ranks, not for " +
                                          std::to_string(ranks.size()));
  }
  for (int i = 0; i < host->ranks(); ++i) {
    world.slots.push_back({std::make_shared<const SharedMemory>(host, i), 0});
  }
  const auto own = std::find(ranks.begin(), ranks.end(), world.topology.rank) - ranks.begin();
  world.arena = std::make_shared<SharedArena>(at(world.slots, static_cast<int>(own)).memory);
}

}  // namespace torch_ring
