// SPDX-License-Identifier: Apache-2.0
// World: the memory, descriptors and names from which a rank's communicator and engine are made.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/at.h"
#include "core/fd.h"
#include "transport/network.h"
#include "transport/shared_arena.h"
#include "transport/shared_memory.h"
#include "transport/socket_source.h"
#include "transport/wait_graph.h"

namespace torch_ring {

/// The hosts and the lanes of the ranks, as seen by one of them.
struct Topology {
  int rank = 0;              // this process
  std::vector<int> host_of;  // rank -> host, hosts numbered in order of their first rank

  int size() const { return static_cast<int>(host_of.size()); }
  int host() const { return at(host_of, rank); }
  int host_count() const;
  std::vector<int> ranks_of_host(int host) const;

  /// The ranks of every host.
  std::vector<std::vector<int>> hosts() const;

  /// The number of lanes: as many as the smallest host has ranks. A lane is a ring of connections
  /// between one rank of each host: lane j joins the j-th ranks.
  int lanes() const;
};

/// The place of a rank's slot.
struct SlotPlace {
  std::shared_ptr<const SharedMemory> memory;  // of the rank
  std::size_t offset = 0;                      // in it; may differ from rank to rank
};

/// A rank's knowledge of its world, or of a process set; `rank` then means the rank in the set. The
/// bindings and the C++ tests make it.
struct World {
  Topology topology;
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  bool may_spin = true;             // every rank on this kernel has a core of its own

  std::unique_ptr<SocketSource> sockets;  // to the ranks of other hosts; null on one host
  std::size_t width = 1;                  // sockets of a connection
  bool checksums = false;                 // of the data of connections
  std::shared_ptr<Network> network;       // null: connections move bytes over their sockets
  std::shared_ptr<WaitGraph> waits;       // may be null

  // Both empty where no two ranks share a host.
  std::vector<SlotPlace> slots;        // of the ranks of this host (Topology::ranks_of_host)
  std::shared_ptr<SharedArena> arena;  // this rank's, shared by all sets of the process
};

/// Maps the memory of this rank's host (HostMemory::create) and fills in `slots` and `arena`: rank
/// i of the memory is the i-th rank of the host, with the world's slot. Precondition: `world` has
/// its topology. Throws Error(kInternal) if the memory does not fit such a host.
void share_host_memory(World& world, Fd memory);

}  // namespace torch_ring
