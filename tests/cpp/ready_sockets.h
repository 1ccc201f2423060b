// SPDX-License-Identifier: Apache-2.0
// ReadySockets and Link: connections over sockets that the test has connected.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/at.h"
#include "transport/connection.h"

namespace torch_ring::test {

/// A SocketSource that has its sockets from the start, or, if `slow`, returns them at the third
/// take() that needs them.
class ReadySockets final : public SocketSource {
 public:
  explicit ReadySockets(std::size_t size, bool slow = false)
      : sockets_(size), refusals_(size, slow ? 2 : 0) {}

  void add(int peer, Socket socket) { at(sockets_, peer).push_back(std::move(socket)); }

  std::vector<Socket> take(int peer, bool needed) override {
    int& refusals = at(refusals_, peer);
    if (refusals > 0) {
      refusals -= needed ? 1 : 0;
      return {};
    }
    return std::exchange(at(sockets_, peer), {});
  }

 private:
  std::vector<std::vector<Socket>> sockets_;  // by peer
  std::vector<int> refusals_;
};

/// A connection that is its own source of sockets.
struct Link {
  Link(std::vector<Socket> sockets, const std::string& peer, bool slow = false,
       std::shared_ptr<Network> network = nullptr)
      : source(1, slow), connection(source, 0, sockets.size(), peer, false, std::move(network)) {
    for (Socket& socket : sockets) source.add(0, std::move(socket));
  }

  ReadySockets source;
  Connection connection;
};

}  // namespace torch_ring::test
