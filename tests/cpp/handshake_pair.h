// SPDX-License-Identifier: Apache-2.0
// HandshakePair: a connecting and an accepting end, driven against each other in memory.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "harness.h"
#include "transport/handshake.h"

namespace torch_ring::test {

using Bytes = std::vector<std::byte>;

inline Key key_of(int seed) {
  Key key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(seed + 7 * i);
  return key;
}

inline constexpr Hello kHello{.from = 3, .to = 1, .set = 5'000'000'000, .channel = 2};

/// Takes all outgoing bytes of `end`.
inline Bytes take(Handshake& end) {
  const auto outgoing = end.outgoing();
  const Bytes message(outgoing.begin(), outgoing.end());
  end.sent(message.size());
  return message;
}

/// Passes the front of a stream to `end`, in parts of at most `part()` bytes, and only as much as
/// it takes. Returns the number of taken bytes.
inline std::size_t give(
    Handshake& end, std::span<const std::byte> stream,
    const std::function<std::size_t()>& part = [] { return ~std::size_t{0}; }) {
  std::size_t given = 0;
  while (given < stream.size()) {
    const auto incoming = end.incoming();
    const std::size_t bytes = std::min({incoming.size(), stream.size() - given, part()});
    if (bytes == 0) break;
    std::ranges::copy(stream.subspan(given, bytes), incoming.begin());
    end.received(bytes);
    given += bytes;
  }
  return given;
}

struct HandshakePair {
  Handshake connecting = Handshake::connecting(key_of(1), kHello);
  Handshake accepting = Handshake::accepting(key_of(1), kHello.to);
};

}  // namespace torch_ring::test
