#include "collective/world.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "transport/host_memory.h"

namespace torch_ring {

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
