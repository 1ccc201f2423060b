// SPDX-License-Identifier: Apache-2.0
// SocketSource: makes the sockets of a connection when they are first needed.
#pragma once

#include <string>
#include <vector>

#include "transport/socket.h"

namespace torch_ring {

/// The sockets that lead to the other ranks of a process set.
///
/// Of two ranks one connects and the other accepts; the implementation knows which. Both call
/// take() until it returns sockets; neither waits for the other inside it.
///
/// Thread: the progress thread. Blocking: no. Errors: Error(kInternal) without descriptors.
class SocketSource {
 public:
  virtual ~SocketSource() = default;

  /// The connected and authenticated sockets to `peer` (its rank in the set), in the peer's order,
  /// once; none as long as there is no connection. `needed`: this rank has to send or receive now,
  /// so it connects if that is its part; otherwise it only takes sockets that the peer has made.
  virtual std::vector<Socket> take(int peer, bool needed) = 0;

  /// Why there is no connection to `peer` yet, if this rank connects and an attempt has failed.
  virtual std::string trouble(int /*peer*/) const { return {}; }
};

}  // namespace torch_ring
