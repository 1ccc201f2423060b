// An ordered byte stream to one peer over a connected socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/fd.h"
#include "transport/waiter.h"

namespace torch_ring {

/// The socket was connected, and its peer authenticated, before it came here (torch_ring/mesh.py).
/// Thread: one at a time. Blocking: never.
/// Errors: Error(kPeerLost) naming the peer when the stream ends or the socket fails.
class Connection {
 public:
  /// Takes a connected stream socket (TCP, or a Unix socket in tests) and makes it non-blocking,
  /// with TCP_NODELAY when it is TCP. `peer` is the label of errors: "rank 2 (10.0.0.7, pid 41)".
  Connection(Fd socket, std::string peer);

  /// Sends or receives what the socket takes or has now; returns the bytes moved, perhaps 0.
  std::size_t try_send(std::span<const std::byte> bytes);
  std::size_t try_receive(std::span<std::byte> bytes);

  /// Whether at least one byte can be received now (or the stream has ended).
  bool readable() const;

  int fd() const noexcept { return socket_.get(); }
  const std::string& peer() const noexcept { return peer_; }

 private:
  Fd socket_;
  std::string peer_;
};

/// Sends `outgoing` through `to` and receives `incoming` from `from` at the same time, so that a
/// ring in which everybody sends cannot block; either may be empty (then its connection may be
/// null). `received(bytes)`, when given, is called as the front of `incoming` grows, with the bytes
/// that have arrived in all, so that a reduction overlaps the transfer.
/// Blocking: until both are done. Errors: Connection's; Error(kTimeout) when neither direction has
/// moved for the waiter's timeout, saying how much of what had moved.
void exchange(Connection* to, std::span<const std::byte> outgoing, Connection* from,
              std::span<std::byte> incoming, const Waiter& waiter,
              const std::function<void(std::size_t)>& received = {});

}  // namespace torch_ring
