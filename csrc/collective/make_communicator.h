// SPDX-License-Identifier: Apache-2.0
// make_communicator(): the communicator that fits a world.
#pragma once

#include <memory>

#include "collective/communicator.h"
#include "collective/world.h"
#include "core/abort.h"
#include "core/config.h"

namespace torch_ring {

/// A communicator for one rank, for one host (shared memory), for one rank a host (ring), or for
/// several ranks on each of several hosts (shared memory inside hosts, rings across them). Takes
/// ownership of the world's `sockets`, and shares its memory. The references must outlive it.
std::shared_ptr<HostCommunicator> make_communicator(World& world, const EngineConfig& config,
                                                    const Abort& abort);

}  // namespace torch_ring
