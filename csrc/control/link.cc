// SPDX-License-Identifier: Apache-2.0
#include "control/link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <string_view>
#include <utility>

namespace torch_ring {

ControlLink::ControlLink(int peer, Socket socket, int size, Clock::time_point now)
    : peer_(peer), socket_(std::move(socket)), parser_(size), heard_(now) {
  // Fails for Unix sockets, which do not need it.
  const int on = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void ControlLink::queue(const Message& message, Clock::time_point due) {
  if (ended_ || deaf_) return;
  message.append_to(outgoing_);
  due_ = std::min(due_, due);
}

void ControlLink::flush(Clock::time_point now) {
  if (now < due_) return;
  std::size_t done = 0;
  blocked_ = false;
  while (done < outgoing_.size() && !blocked_) {
    const auto sent = socket_.send(std::as_bytes(std::span(outgoing_)).subspan(done));
    if (sent >= 0) {
      done += static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      blocked_ = true;
    } else if (errno != EINTR) {
      // The peer's last messages, maybe its goodbye, are still to be received: receive() judges.
      deaf_ = true;
      if (errno != EPIPE) was_reset_ = true;  // receive() finds only an end then
      done = outgoing_.size();
    }
  }
  outgoing_.erase(0, done);
  if (outgoing_.empty()) due_ = Clock::time_point::max();
}

std::vector<Message> ControlLink::receive(Clock::time_point now) {
  std::vector<Message> messages;
  char buffer[16u << 10];
  // A bound, for a peer that sends faster than this rank parses.
  for (int i = 0; i < 64 && !ended_; ++i) {
    const auto bytes = socket_.receive(std::as_writable_bytes(std::span(buffer)));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (bytes < 0 && errno == EBADMSG) {
      throw Error(ErrorKind::kPeerLost,
                  "sent data that arrived damaged or forged: TLS does not accept them");
    }
    if (bytes <= 0) {
      if (bytes < 0) was_reset_ = true;
      close();
      break;
    }
    heard_ = now;
    parser_.append(std::string_view(buffer, static_cast<std::size_t>(bytes)));
    while (auto message = parser_.next()) messages.push_back(std::move(*message));
    if (static_cast<std::size_t>(bytes) < sizeof buffer) break;
  }
  return messages;
}

void ControlLink::end_sending() noexcept {
  if (std::exchange(sends_, false)) ::shutdown(socket_.get(), SHUT_WR);
}

void ControlLink::drain() noexcept {
  char buffer[16u << 10];
  while (!ended_) {
    const auto bytes = socket_.receive(std::as_writable_bytes(std::span(buffer)));
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (bytes == 0 || (bytes < 0 && errno != EINTR)) close();
  }
}

void ControlLink::close() noexcept {
  socket_ = Socket();
  outgoing_.clear();
  due_ = Clock::time_point::max();
  ended_ = true;
}

void ControlLink::add_to(PollSet& polls) {
  slot_ = polls.add(socket_.get(), static_cast<short>(blocked_ ? POLLIN | POLLOUT : POLLIN));
}

}  // namespace torch_ring
