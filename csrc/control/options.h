// SPDX-License-Identifier: Apache-2.0
// ControlOptions: the parameters of a control plane.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/fd.h"
#include "transport/handshake.h"
#include "transport/tls.h"

namespace torch_ring {

struct TcpAddress {
  std::string host;  // a numeric IPv4 or IPv6 address
  std::uint16_t port = 0;
};

/// The addresses on which a rank listens.
struct Address {
  std::string socket;           // of its abstract Unix socket, without the leading zero byte
  std::vector<TcpAddress> tcp;  // between hosts: one per network interface, as many on all ranks
};

/// An address for system calls. Throws Error(kInvalidArgument) if it is invalid.
struct SocketAddress {
  /// The address of an abstract Unix socket.
  explicit SocketAddress(const std::string& unix_socket);
  explicit SocketAddress(const TcpAddress& address);

  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }

  sockaddr_storage storage{};
  socklen_t bytes = 0;
};

struct ControlOptions {
  int rank = 0;
  std::vector<int> host_of;         // rank -> host; ranks of one host use Unix sockets
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  std::vector<Address> addresses;   // by rank
  Key key{};
  std::shared_ptr<const TlsContext> tls;  // of connections between hosts; null: in the clear
  Fd unix_listener;                       // bound and listening
  std::vector<Fd> tcp_listeners;          // one per network interface; none on one host
  std::chrono::milliseconds heartbeat_timeout{60'000};
  Fd launcher;                // a pidfd of the process that started this one; none: no watch
  std::string launcher_died;  // the line for stderr, before this process ends, too

  int size() const { return static_cast<int>(host_of.size()); }
};

/// Errors: Error(kInvalidArgument) if they do not fit together.
void check(const ControlOptions& options);

}  // namespace torch_ring
