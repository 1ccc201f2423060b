// SPDX-License-Identifier: Apache-2.0
// Authentication: the handshake of a new connection, over its socket.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>

#include "core/fd.h"
#include "transport/handshake.h"
#include "transport/socket.h"
#include "transport/tls.h"

namespace torch_ring {

/// Advances a handshake in the clear, as Authentication::advance().
int advance_handshake(Handshake& handshake, int fd);

/// Both ends prove that they know the key of the world: by TLS, or else by torch_ring's Handshake.
///
/// Thread: one at a time. Blocking: no.
class Authentication {
 public:
  /// `tls`: null for a connection in the clear. Errors: those of the handshakes.
  static Authentication connecting(Fd socket, const Key& key, std::shared_ptr<const TlsContext> tls,
                                   const Hello& hello);
  static Authentication accepting(Fd socket, const Key& key, std::shared_ptr<const TlsContext> tls,
                                  std::uint32_t rank);

  /// Advances as far as the socket allows. Returns 0, or the errno with which the connection ended
  /// (ECONNRESET if it was closed). Errors: those of Handshake::received() or
  /// TlsStream::shake_hands().
  int advance();
  bool done() const;
  /// Whether it waits for room in the socket; otherwise it waits for bytes.
  bool sends() const;
  /// The connection's name; on the accepting side only after done().
  const Hello& hello() const;

  int fd() const noexcept { return socket_.get(); }
  /// The connection, after done().
  Socket take();

 private:
  using Tls = std::unique_ptr<TlsStream>;

  Authentication(Fd socket, std::variant<Handshake, Tls> handshake)
      : socket_(std::move(socket)), handshake_(std::move(handshake)) {}

  Fd socket_;
  std::variant<Handshake, Tls> handshake_;
};

}  // namespace torch_ring
