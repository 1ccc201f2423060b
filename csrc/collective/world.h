// What a communicator is made of: who is where, and the descriptors that lead there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/communicator.h"
#include "core/abort.h"
#include "core/config.h"
#include "core/fd.h"

namespace torch_ring {

/// Everything a rank knows about its world, with every descriptor already connected and every peer
/// already authenticated. torch_ring/mesh.py makes it; the C++ tests make it of socket pairs.
struct World {
  int rank = 0;
  int size = 1;
  std::vector<int> host_of;         // rank -> host, hosts numbered in order of their first rank
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  bool may_spin = true;             // every rank on this kernel has a core of its own

  std::vector<std::vector<Fd>> data;  // rank -> sockets for data; none where needs_data() is false
  std::vector<Fd> memory;     // rank -> its memfd (transport/shared_memory.h); same host, and self
  std::vector<Fd> doorbells;  // rank -> its eventfd; same host, and self
  std::vector<Fd> control;    // rank -> the watchdog's connection; all but self

  std::vector<int> ranks_of_host(int host) const;
  int host_count() const;
  /// The ranks of a host that drive its network, one connection ring each: as many as the smallest
  /// host has ranks.
  int lanes() const;
  /// Whether `rank` and `peer` exchange data over a connection: both are on the same lane of
  /// different hosts.
  bool needs_data(int peer) const;
};

/// The communicator that fits: one rank, one host (shared memory), one rank a host (ring), or
/// shared memory inside hosts and rings across them. Takes `data`, `memory` and `doorbells`.
/// The references must outlive it.
std::shared_ptr<Communicator> make_communicator(World& world, const EngineConfig& config,
                                                const Abort& abort);

}  // namespace torch_ring
