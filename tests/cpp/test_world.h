// SPDX-License-Identifier: Apache-2.0
// make_worlds() and Layout: worlds for tests, whose ranks are threads with their own descriptors.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "collective/make_communicator.h"
#include "core/abort.h"
#include "core/at.h"
#include "harness.h"
#include "ready_sockets.h"
#include "tls_pair.h"
#include "transport/doorbell.h"
#include "transport/host_memory.h"
#include "transport/waiter.h"
#include "ucx_network.h"

namespace torch_ring::test {

/// The kind of connection between two ranks. kTls: TCP with TLS. kUcx: UCX, beside TCP sockets.
enum class Sockets { kUnix, kTcp, kTls, kUcx };

/// Two ends of one stream.
inline std::pair<Fd, Fd> unix_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) throw_errno("socketpair");
  return {Fd(ends[0]), Fd(ends[1])};
}

/// The same over the loopback interface.
inline std::pair<Fd, Fd> tcp_pair() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t bytes = sizeof address;

  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(listener.get(), generic, bytes) < 0 || ::listen(listener.get(), 1) < 0 ||
      ::getsockname(listener.get(), generic, &bytes) < 0) {
    throw_errno("listen on the loopback interface");
  }
  Fd one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(one.get(), generic, bytes) < 0) throw_errno("connect");
  Fd other(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!other) throw_errno("accept");
  return {std::move(one), std::move(other)};
}

inline std::pair<Socket, Socket> socket_pair(Sockets sockets) {
  if (sockets == Sockets::kTls) return with_tls(tcp_pair());
  auto [one, other] = sockets == Sockets::kUnix ? unix_pair() : tcp_pair();
  return {Socket(std::move(one)), Socket(std::move(other))};
}

/// One socket as the vector that Connection takes.
inline std::vector<Socket> alone(Fd socket) {
  std::vector<Socket> sockets;
  sockets.emplace_back(std::move(socket));
  return sockets;
}

inline Fd duplicate(const Fd& fd) {
  const int copy = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw_errno("fcntl(F_DUPFD_CLOEXEC)");
  return Fd(copy);
}

/// The worlds of all ranks, like those of torch_ring/world; rank r is on host_of[r].
inline std::vector<World> make_worlds(const std::vector<int>& host_of,
                                      Sockets sockets = Sockets::kUnix, int connections = 1) {
  constexpr std::size_t kArenaBytes = 16u << 20;
  const std::size_t size = host_of.size();
  std::vector<World> worlds(size);
  std::vector<std::unique_ptr<ReadySockets>> sockets_of;
  for (std::size_t rank = 0; rank < size; ++rank) {
    World& world = worlds[rank];
    world.topology = {static_cast<int>(rank), host_of};
    world.may_spin = false;  // more threads than cores
    for (std::size_t peer = 0; peer < size; ++peer) {
      world.labels.push_back("rank " + std::to_string(peer) + " (a thread)");
    }
    if (sockets == Sockets::kUcx) world.network = ucx_network(static_cast<int>(rank));
    sockets_of.push_back(std::make_unique<ReadySockets>(size));
    world.width = static_cast<std::size_t>(connections);
  }
  for (std::size_t one = 0; one < size; ++one) {
    for (std::size_t other = one + 1; other < size; ++other) {
      if (host_of[one] == host_of[other]) continue;
      for (int i = 0; i < connections; ++i) {
        auto [ours, theirs] = socket_pair(sockets);
        sockets_of[one]->add(static_cast<int>(other), std::move(ours));
        sockets_of[other]->add(static_cast<int>(one), std::move(theirs));
      }
    }
  }
  for (std::size_t rank = 0; rank < size; ++rank) {
    worlds[rank].sockets = std::move(sockets_of[rank]);
  }
  for (const std::vector<int>& ranks : worlds.front().topology.hosts()) {
    if (worlds.front().topology.host_count() == worlds.front().topology.size()) break;
    const Fd memory = HostMemory::create(static_cast<int>(ranks.size()), {}, kArenaBytes);
    for (const int rank : ranks) share_host_memory(at(worlds, rank), duplicate(memory));
  }
  return worlds;
}

/// A layout for the suites: the hosts of the ranks, and the connections between hosts. It
/// determines the communicator that make_communicator() makes.
struct Layout {
  std::string name;
  std::function<std::vector<int>(int size)> host_of;
  std::vector<int> sizes{1, 2, 3, 4};
  Sockets sockets = Sockets::kUnix;
  bool may_spin = false;
  int connections = 1;  // sockets between two ranks
  /// Makes the communicator under test from make_communicator()'s and the rank's Abort; empty:
  /// tests the former.
  std::function<std::shared_ptr<HostCommunicator>(std::shared_ptr<HostCommunicator>, Abort&)> over =
      {};
  bool checksums = false;
};

inline std::vector<int> one_host(int size) {
  return std::vector<int>(static_cast<std::size_t>(size), 0);
}
inline std::vector<int> one_rank_a_host(int size) {
  std::vector<int> host_of(static_cast<std::size_t>(size));
  std::iota(host_of.begin(), host_of.end(), 0);
  return host_of;
}

inline std::vector<int> two_hosts(int size) {
  std::vector<int> host_of(static_cast<std::size_t>(size), 1);
  std::fill_n(host_of.begin(), (size + 1) / 2, 0);
  return host_of;
}

inline std::vector<int> two_hosts_in_turns(int size) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank % 2);
  return host_of;
}

/// Three hosts with 2 + 1 + 1 or 2 + 2 + 1 ranks: some ranks are on no lane.
inline std::vector<int> three_hosts(int size) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank * 3 / size);
  return host_of;
}

/// A config with a timeout that only a hang reaches, shorter than the harness's.
inline EngineConfig patient() {
  EngineConfig config;
  config.timeout = std::chrono::seconds(30);
  return config;
}

/// A rank's Waiter and its parts, for tests of connections and boards.
struct Waiting {
  explicit Waiting(std::chrono::milliseconds timeout = patient().timeout)
      : waiter(abort, doorbell, false, timeout) {}

  Abort abort;
  Doorbell doorbell;
  Waiter waiter;
};

/// Runs `fn` on every rank of a new world, each with its communicator and its Abort.
inline void run_world(const Layout& layout, int size,
                      const std::function<void(HostCommunicator&, Abort&)>& fn,
                      const EngineConfig& config = patient()) {
  std::vector<World> worlds = make_worlds(layout.host_of(size), layout.sockets, layout.connections);
  run_ranks(size, [&](int rank) {
    World& world = at(worlds, rank);
    world.may_spin = layout.may_spin;
    world.checksums = layout.checksums;
    Abort abort;
    std::shared_ptr<HostCommunicator> communicator = make_communicator(world, config, abort);
    if (layout.over) communicator = layout.over(std::move(communicator), abort);
    fn(*communicator, abort);
  });
}

/// Registers `body(layout, size)` for every size: "<layout> x<size>: <name>". Under a sanitizer,
/// ten times slower, it leaves out sizes above three if a layout has smaller ones: they run the
/// same code.
inline void add_for_sizes(const Layout& layout, const std::string& name,
                          const std::function<void(const Layout&, int size)>& body) {
  if (layout.sockets == Sockets::kUcx && !has_ucx()) return;  // connection_test.cc reports it
  if (layout.sockets == Sockets::kTls && !has_tls()) return;
  for (const int size : layout.sizes) {
    if (kSanitized && size > 3 && size != layout.sizes.front()) continue;
    add_test(layout.name + " x" + std::to_string(size) + ": " + name, [=] { body(layout, size); });
  }
}

}  // namespace torch_ring::test
