// SPDX-License-Identifier: Apache-2.0
#include "control/options.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>

#include "core/at.h"
#include "core/error.h"

namespace torch_ring {

SocketAddress::SocketAddress(const std::string& unix_socket) {
  auto& un = reinterpret_cast<sockaddr_un&>(storage);
  if (unix_socket.empty() || unix_socket.size() + 1 > sizeof un.sun_path) {
    throw Error(ErrorKind::kInvalidArgument, "no name of a Unix socket: '" + unix_socket + "'");
  }
  un.sun_family = AF_UNIX;
  std::memcpy(un.sun_path + 1, unix_socket.data(), unix_socket.size());  // after a zero byte
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + unix_socket.size());
}

SocketAddress::SocketAddress(const TcpAddress& address) {
  auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
  if (::inet_pton(AF_INET, address.host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(address.port);
    bytes = sizeof v4;
  } else if (::inet_pton(AF_INET6, address.host.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(address.port);
    bytes = sizeof v6;
  } else {
    throw Error(ErrorKind::kInvalidArgument, "not a numeric address: '" + address.host + "'");
  }
}

void check(const ControlOptions& options) {
  const auto size = options.host_of.size();
  if (options.labels.size() != size || options.addresses.size() != size || options.rank < 0 ||
      options.rank >= options.size()) {
    throw Error(ErrorKind::kInvalidArgument,
                "a control plane needs a host, a label and an address of each rank, and one of the "
                "ranks");
  }
  const int host = at(options.host_of, options.rank);
  const auto interfaces = at(options.addresses, options.rank).tcp.size();
  for (int peer = 0; peer < options.size(); ++peer) {
    const Address& address = at(options.addresses, peer);
    if (address.tcp.empty() || address.tcp.size() != interfaces) {
      throw Error(ErrorKind::kInvalidArgument,
                  "the ranks of a control plane need equally many TCP addresses, one at least");
    }
    if (peer == options.rank) continue;
    if (at(options.host_of, peer) == host) {
      SocketAddress(address.socket);
    } else {
      for (const TcpAddress& tcp : address.tcp) SocketAddress{tcp};
    }
  }
}

}  // namespace torch_ring
