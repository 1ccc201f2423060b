// SPDX-License-Identifier: Apache-2.0
// ConnectionLost: the Error of a lost connection to a rank that may still be alive.
#pragma once

#include <string>

#include "core/error.h"

namespace torch_ring {

/// Thrown when the peer or the network has closed a connection. A rank that fails closes its
/// connections, too; then the error that it reports is the cause.
class ConnectionLost : public Error {
 public:
  /// `rank`: the peer, as a rank of the communicator.
  ConnectionLost(int rank, const std::string& what)
      : Error(ErrorKind::kPeerLost, what), rank_(rank) {}

  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// The error of a connection that was lost although its peer lives.
inline Error cut_by_network(const Error& lost) {
  return {lost.kind(), std::string(lost.what()) +
                           ", although both ranks live: a firewall, NAT or another device of the "
                           "network may have cut it"};
}

}  // namespace torch_ring
