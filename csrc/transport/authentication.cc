// SPDX-License-Identifier: Apache-2.0
#include "transport/authentication.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace torch_ring {

int advance_handshake(Handshake& handshake, int fd) {
  while (true) {
    if (const auto outgoing = handshake.outgoing(); !outgoing.empty()) {
      const auto sent = ::send(fd, outgoing.data(), outgoing.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent > 0) handshake.sent(static_cast<std::size_t>(sent));
      if (sent >= 0 || errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
    }
    if (handshake.done()) return 0;
    const auto incoming = handshake.incoming();
    if (incoming.empty()) return ECONNRESET;  // this end has refused the other
    const auto received = ::recv(fd, incoming.data(), incoming.size(), MSG_DONTWAIT);
    if (received == 0) return ECONNRESET;
    if (received > 0) handshake.received(static_cast<std::size_t>(received));
    if (received > 0 || errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
  }
}

Authentication Authentication::connecting(Fd socket, const Key& key,
                                          std::shared_ptr<const TlsContext> tls,
                                          const Hello& hello) {
  if (!tls) return {std::move(socket), Handshake::connecting(key, hello)};
  auto stream = TlsStream::connecting(std::move(tls), socket.get(), hello);
  return {std::move(socket), std::move(stream)};
}

Authentication Authentication::accepting(Fd socket, const Key& key,
                                         std::shared_ptr<const TlsContext> tls,
                                         std::uint32_t rank) {
  if (!tls) return {std::move(socket), Handshake::accepting(key, rank)};
  auto stream = TlsStream::accepting(std::move(tls), socket.get(), rank);
  return {std::move(socket), std::move(stream)};
}

int Authentication::advance() {
  if (auto* tls = std::get_if<Tls>(&handshake_)) return (*tls)->shake_hands();
  return advance_handshake(std::get<Handshake>(handshake_), socket_.get());
}

bool Authentication::done() const {
  if (const auto* tls = std::get_if<Tls>(&handshake_)) return (*tls)->is_open() && !(*tls)->sends();
  return std::get<Handshake>(handshake_).done();
}

bool Authentication::sends() const {
  if (const auto* tls = std::get_if<Tls>(&handshake_)) return (*tls)->sends();
  return !std::get<Handshake>(handshake_).outgoing().empty();
}

const Hello& Authentication::hello() const {
  if (const auto* tls = std::get_if<Tls>(&handshake_)) return (*tls)->hello();
  return std::get<Handshake>(handshake_).hello();
}

Socket Authentication::take() {
  if (auto* tls = std::get_if<Tls>(&handshake_)) return {std::move(socket_), std::move(*tls)};
  return Socket(std::move(socket_));
}

}  // namespace torch_ring
