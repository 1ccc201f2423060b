// ConnectionLost: the Error of a connection to a rank that may live all the same.
#pragma once

#include <string>

#include "core/error.h"

namespace torch_ring {

/// Thrown where the other end has closed a connection, or the network has. A rank that fails closes
/// its connections, too: its own words about that are the cause then.
class ConnectionLost : public Error {
 public:
  /// `rank`: the other end, as the communicator counts.
  ConnectionLost(int rank, const std::string& what)
      : Error(ErrorKind::kPeerLost, what), rank_(rank) {}

  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

}  // namespace torch_ring
