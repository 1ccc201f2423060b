// SPDX-License-Identifier: Apache-2.0
#include "collective/make_communicator.h"

#include "collective/hierarchical_communicator.h"
#include "collective/local_communicator.h"
#include "collective/ring_communicator.h"
#include "collective/shm_communicator.h"

namespace torch_ring {

namespace {

/// A RingCommunicator of single ranks, with its doorbell, waiter and sockets.
struct Ring {
  Ring(World& world, const EngineConfig& config, const Abort& abort)
      : waiter(abort, doorbell, world.may_spin, config.transfer_timeout(), world.waits),
        sockets(std::move(world.sockets)),
        communicator(world.topology.rank, connections(world), waiter) {}

  std::vector<std::unique_ptr<Connection>> connections(const World& world) const {
    std::vector<std::unique_ptr<Connection>> connections;
    for (int peer = 0; peer < world.topology.size(); ++peer) {
      connections.push_back(peer == world.topology.rank
                                ? nullptr
                                : std::make_unique<Connection>(*sockets, peer, world.width,
                                                               at(world.labels, peer),
                                                               world.checksums, world.network));
    }
    return connections;
  }

  Doorbell doorbell;
  Waiter waiter;
  std::unique_ptr<SocketSource> sockets;
  RingCommunicator communicator;
};

}  // namespace

std::shared_ptr<HostCommunicator> make_communicator(World& world, const EngineConfig& config,
                                                    const Abort& abort) {
  const int size = world.topology.size();
  const int hosts = world.topology.host_count();
  if (size == 1) return std::make_shared<LocalCommunicator>();
  if (hosts == 1) return std::make_shared<ShmCommunicator>(world, config, abort);
  if (hosts == size) {
    const auto ring = std::make_shared<Ring>(world, config, abort);
    return {ring, &ring->communicator};
  }
  return std::make_shared<HierarchicalCommunicator>(world, config, abort);
}

}  // namespace torch_ring
