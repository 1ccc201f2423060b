// SPDX-License-Identifier: Apache-2.0
// with_tls(): the two ends of a connection with TLS.
#pragma once

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "handshake_pair.h"
#include "harness.h"
#include "transport/authentication.h"

namespace torch_ring::test {

/// Whether this process can load OpenSSL: a static one, for another processor, cannot.
inline bool has_tls() {
  try {
    openssl::load();
    return true;
  } catch (const Error&) {
    return false;
  }
}

inline std::shared_ptr<const TlsContext> tls_of(int seed) {
  return std::make_shared<TlsContext>(key_of(seed));
}

/// Advances both ends until both are done.
inline void shake_hands(Authentication& one, Authentication& other) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!one.done() || !other.done()) {
    CHECK_EQ(one.advance(), 0);
    CHECK_EQ(other.advance(), 0);
    if (std::chrono::steady_clock::now() > deadline) throw CheckFailed("never: a handshake");
    std::this_thread::yield();
  }
}

/// TLS over two ends of one stream.
inline std::pair<Socket, Socket> with_tls(std::pair<Fd, Fd> ends) {
  const auto context = tls_of(1);
  auto one = Authentication::connecting(std::move(ends.first), key_of(1), context, kHello);
  auto other = Authentication::accepting(std::move(ends.second), key_of(1), context, kHello.to);
  shake_hands(one, other);
  return {one.take(), other.take()};
}

}  // namespace torch_ring::test
