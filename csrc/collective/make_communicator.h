// make_communicator(): the communicator that fits a world.
#pragma once

#include <memory>

#include "collective/host_communicator.h"
#include "collective/world.h"
#include "core/abort.h"
#include "core/config.h"

namespace torch_ring {

/// The communicator that fits: one rank, one host (shared memory), one rank a host (ring), or
/// shared memory inside hosts and rings across them. Takes `data`, `memory` and `doorbells`.
/// The references must outlive it.
std::shared_ptr<HostCommunicator> make_communicator(World& world, const EngineConfig& config,
                                                    const Abort& abort);

}  // namespace torch_ring
