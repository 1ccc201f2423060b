#include "collective/world.h"

#include <algorithm>
#include <atomic>

#include "collective/hierarchical_communicator.h"
#include "collective/local_communicator.h"
#include "collective/ring_communicator.h"
#include "collective/shm_communicator.h"

namespace torch_ring {

namespace {

/// A ring of single ranks, with what it waits by.
struct Ring {
  Ring(World& world, const EngineConfig& config, const Abort& abort)
      : doorbell(Doorbell::make_event_fd(), &asleep),
        waiter(abort, doorbell, world.may_spin, config.timeout),
        communicator(world.rank, connections(world), waiter) {}

  static std::vector<std::unique_ptr<Connection>> connections(World& world) {
    std::vector<std::unique_ptr<Connection>> connections;
    for (std::size_t peer = 0; peer < world.data.size(); ++peer) {
      connections.push_back(
          static_cast<int>(peer) == world.rank
              ? nullptr
              : std::make_unique<Connection>(std::move(world.data[peer]), world.labels[peer]));
    }
    return connections;
  }

  std::atomic<std::uint32_t> asleep{0};
  Doorbell doorbell;
  Waiter waiter;
  RingCommunicator communicator;
};

}  // namespace

std::vector<int> World::ranks_of_host(int host) const {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) {
    if (host_of[static_cast<std::size_t>(r)] == host) ranks.push_back(r);
  }
  return ranks;
}

int World::host_count() const { return *std::max_element(host_of.begin(), host_of.end()) + 1; }

int World::lanes() const {
  std::size_t smallest = host_of.size();
  for (int host = 0; host < host_count(); ++host) {
    smallest = std::min(smallest, ranks_of_host(host).size());
  }
  return static_cast<int>(smallest);
}

bool World::needs_data(int peer) const {
  const auto lane_of = [&](int r) {
    const auto ranks = ranks_of_host(host_of[static_cast<std::size_t>(r)]);
    return std::find(ranks.begin(), ranks.end(), r) - ranks.begin();
  };
  return host_of[static_cast<std::size_t>(peer)] != host_of[static_cast<std::size_t>(rank)] &&
         lane_of(peer) == lane_of(rank) && lane_of(rank) < lanes();
}

std::shared_ptr<Communicator> make_communicator(World& world, const EngineConfig& config,
                                                const Abort& abort) {
  if (world.size == 1) return std::make_shared<LocalCommunicator>();
  if (world.host_count() == 1) return std::make_shared<ShmCommunicator>(world, config, abort);
  if (world.host_count() == world.size) {
    const auto ring = std::make_shared<Ring>(world, config, abort);
    return {ring, &ring->communicator};
  }
  return std::make_shared<HierarchicalCommunicator>(world, config, abort);
}

}  // namespace torch_ring
