// World: the descriptors and names from which a rank's communicator and engine are made.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "collective/topology.h"
#include "core/fd.h"
#include "transport/socket_source.h"

namespace torch_ring {

/// A rank's knowledge of its world, or of a process set, in which `rank` then means the rank in the
/// set. torch_ring/world makes it, and the C++ tests do.
struct World {
  Topology topology;
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  bool may_spin = true;             // every rank on this kernel has a core of its own

  std::unique_ptr<SocketSource> sockets;  // to the ranks of other hosts; null on one host
  std::size_t width = 1;                  // sockets of a connection

  std::vector<Fd> memory;     // rank -> its memfd (transport/shared_memory.h); same host, and self
  std::vector<Fd> doorbells;  // rank -> its eventfd; same host, and self
};

}  // namespace torch_ring
