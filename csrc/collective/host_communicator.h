// HostCommunicator: a communicator over host memory, with what an engine needs besides.
#pragma once

#include "collective/board.h"
#include "collective/communicator.h"
#include "collective/shared_buffers.h"

namespace torch_ring {

/// A Communicator and two capabilities: its ranks agree on a board, and may share memory.
class HostCommunicator : public Communicator {
 public:
  /// The board of these ranks. It lives as long as the communicator.
  virtual Board& board() = 0;

  /// The shared memory of this rank, or null if the world has none: one rank, or one rank a host.
  /// Thread: any.
  virtual SharedBuffers* shared_buffers() { return nullptr; }
};

}  // namespace torch_ring
