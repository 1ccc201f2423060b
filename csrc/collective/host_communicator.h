// HostCommunicator: a communicator over host memory, with a board and shared buffers.
#pragma once

#include "collective/board.h"
#include "collective/communicator.h"
#include "collective/shared_buffers.h"

namespace torch_ring {

/// A Communicator with two capabilities for the engine: a board on which its ranks agree, and, on
/// some layouts, shared memory.
class HostCommunicator : public Communicator {
 public:
  /// The ranks' board. It lives as long as the communicator.
  virtual Board& board() = 0;

  /// The shared memory of this rank, or null if the world has none: one rank, or one rank a host.
  /// Thread: any.
  virtual SharedBuffers* shared_buffers() { return nullptr; }
};

}  // namespace torch_ring
