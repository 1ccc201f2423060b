// World: the descriptors and names from which a rank's communicator and engine are made.
#pragma once

#include <string>
#include <vector>

#include "collective/topology.h"
#include "core/fd.h"

namespace torch_ring {

/// A rank's knowledge of its world. Every descriptor is connected and every peer authenticated:
/// torch_ring/connections makes it; the C++ tests make it of socket pairs.
struct World {
  Topology topology;
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  bool may_spin = true;             // every rank on this kernel has a core of its own

  std::vector<std::vector<Fd>> data;  // rank -> sockets for data; none where needs_data() is false
  std::vector<Fd> memory;     // rank -> its memfd (transport/shared_memory.h); same host, and self
  std::vector<Fd> doorbells;  // rank -> its eventfd; same host, and self
  std::vector<Fd> control;    // rank -> the watchdog's connection; all but self
};

}  // namespace torch_ring
