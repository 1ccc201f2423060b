// SPDX-License-Identifier: Apache-2.0
// Socket: a connected stream socket, in the clear or with TLS.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/fd.h"
#include "transport/tls.h"

namespace torch_ring {

/// Thread: one at a time. Blocking: no.
class Socket {
 public:
  Socket() = default;
  /// In the clear.
  explicit Socket(Fd fd) : fd_(std::move(fd)) {}
  /// `tls`: over that descriptor, and open.
  Socket(Fd fd, std::unique_ptr<TlsStream> tls) : fd_(std::move(fd)), tls_(std::move(tls)) {}

  int get() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }
  const TlsStream* tls() const noexcept { return tls_.get(); }

  /// As send(2) and recv(2). With TLS EBADMSG says that a record is damaged, or a stranger's; and
  /// bytes of a call that were not sent are the first of the next call.
  ssize_t send(std::span<const std::byte> bytes) {
    if (tls_) return tls_->send(bytes);
    return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  ssize_t receive(std::span<std::byte> bytes) {
    if (tls_) return tls_->receive(bytes);
    return ::recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  }
  /// Whether received bytes wait here, of which poll() does not tell.
  bool has_received() const { return tls_ && tls_->has_received(); }

 private:
  Fd fd_;
  std::unique_ptr<TlsStream> tls_;
};

}  // namespace torch_ring
