// SPDX-License-Identifier: Apache-2.0
// make_planes(): control planes for tests, whose ranks are objects of one process.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "control/control_plane.h"
#include "core/at.h"
#include "harness.h"

namespace torch_ring::test {

/// A listener with a name that the kernel chooses, and that name.
inline std::pair<Fd, std::string> unix_listener() {
  Fd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t bytes = sizeof address.sun_family;  // no name: "autobind" in unix(7)
  if (::bind(listener.get(), generic, bytes) < 0 || ::listen(listener.get(), 1024) < 0) {
    throw_errno("listen on a Unix socket");
  }
  bytes = sizeof address;
  if (::getsockname(listener.get(), generic, &bytes) < 0) throw_errno("getsockname");
  return {std::move(listener),
          std::string(address.sun_path + 1, bytes - offsetof(sockaddr_un, sun_path) - 1)};
}

/// A listener at an address of the loopback interface, and its port.
inline std::pair<Fd, std::uint16_t> tcp_listener(const std::string& host) {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::inet_addr(host.c_str());
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t bytes = sizeof address;
  if (::bind(listener.get(), generic, bytes) < 0 || ::listen(listener.get(), 1024) < 0 ||
      ::getsockname(listener.get(), generic, &bytes) < 0) {
    throw_errno("listen on the loopback interface");
  }
  return {std::move(listener), ntohs(address.sin_port)};
}

/// The options of all ranks' planes, with listeners; rank r is on host_of[r]. Ranks of one host
/// meet over Unix sockets, others over the loopback interface, with one address for each network
/// interface.
inline std::vector<ControlOptions> make_plane_options(
    const std::vector<int>& host_of,
    std::chrono::milliseconds heartbeat_timeout = std::chrono::minutes(1), int interfaces = 1) {
  std::vector<ControlOptions> all(host_of.size());
  std::vector<Address> addresses(host_of.size());
  std::vector<std::string> labels;
  Key key{};
  key.fill(std::byte{7});
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    labels.push_back("rank " + std::to_string(rank) + " (a thread)");
    std::tie(all[rank].unix_listener, addresses[rank].socket) = unix_listener();
    for (int i = 0; i < interfaces; ++i) {
      const std::string host = "127.0.0." + std::to_string(1 + i);
      auto [listener, port] = tcp_listener(host);
      all[rank].tcp_listeners.push_back(std::move(listener));
      addresses[rank].tcp.push_back({host, port});
    }
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    all[rank].rank = static_cast<int>(rank);
    all[rank].host_of = host_of;
    all[rank].labels = labels;
    all[rank].addresses = addresses;
    all[rank].key = key;
    all[rank].heartbeat_timeout = heartbeat_timeout;
  }
  return all;
}

using Planes = std::vector<std::unique_ptr<ControlPlane>>;

/// Waits until `holds()`, at most 20 s; then fails with `what`.
template <class Holds>
void wait_until(Holds&& holds, const std::string& what) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) throw CheckFailed("never: " + what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

inline void wait_until_complete(const Planes& planes) {
  for (const auto& plane : planes) {
    if (plane) wait_until([&] { return plane->missing().empty(); }, "all neighbours connected");
  }
}

/// The error of a plane that cannot connect to its neighbours.
inline Error setup_error(const ControlPlane& plane) {
  std::optional<Error> error;
  const auto fails = [&] {
    try {
      plane.missing();
    } catch (const Error& caught) {
      error = caught;
    }
    return error.has_value();
  };
  wait_until(fails, "an error");
  return *error;
}

inline Planes start_planes(std::vector<ControlOptions> all) {
  Planes planes;
  for (ControlOptions& options : all) {
    planes.push_back(std::make_unique<ControlPlane>(std::move(options)));
  }
  return planes;
}

/// Connected planes of all ranks.
inline Planes make_planes(const std::vector<int>& host_of,
                          std::chrono::milliseconds heartbeat_timeout = std::chrono::minutes(1),
                          bool tls = false) {
  std::vector<ControlOptions> all = make_plane_options(host_of, heartbeat_timeout);
  for (ControlOptions& options : all) {
    if (tls) options.tls = std::make_shared<TlsContext>(options.key);
  }
  Planes planes = start_planes(std::move(all));
  wait_until_complete(planes);
  return planes;
}

}  // namespace torch_ring::test
