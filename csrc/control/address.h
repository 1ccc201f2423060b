// Address, SocketAddress: where a rank's listeners are.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace torch_ring {

struct Address {
  std::string socket;  // the name of its abstract Unix socket, without the leading zero byte
  std::string host;    // a numeric IPv4 or IPv6 address; used between hosts
  std::uint16_t port = 0;
};

/// An address as the system calls take it.
struct SocketAddress {
  /// That of the Unix socket, or of the TCP one. Throws Error(kInvalidArgument) if there is none.
  SocketAddress(const Address& address, bool unix);

  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }

  sockaddr_storage storage{};
  socklen_t bytes = 0;
};

}  // namespace torch_ring
