// SPDX-License-Identifier: Apache-2.0
#include "transport/connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iomanip>
#include <sstream>
#include <system_error>
#include <utility>

#include "core/connection_lost.h"
#include "core/error.h"
#include "core/failpoint.h"

namespace torch_ring {

namespace {

// Most bytes that one call moves over sockets: neither direction of an exchange waits long for the
// other, and received data is still in the cache when it is reduced.
constexpr std::size_t kMoveBytes = 256u << 10;

void make_non_blocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw_errno("fcntl(O_NONBLOCK)");
}

bool is_tcp(int fd) {
  int protocol = 0;
  socklen_t bytes = sizeof protocol;
  return ::getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &bytes) == 0 &&
         protocol == IPPROTO_TCP;
}

constexpr std::byte kAcknowledgement{0xa5};

bool try_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

[[noreturn]] void throw_failed(int rank, const std::string& peer, int error) {
  if (error == EBADMSG) {
    throw Error(ErrorKind::kInternal, "data from " + peer +
                                          " arrived damaged or forged: TLS does not accept them. A "
                                          "network card, a switch or the memory of one of the two "
                                          "hosts is broken, or somebody changes the traffic");
  }
  throw ConnectionLost(
      rank, "connection to " + peer + " failed: " + std::generic_category().message(error));
}

/// "1.2 of 4.5 MiB"
std::string progress(std::size_t done, std::size_t all) {
  constexpr std::array<const char*, 4> kUnits{"bytes", "KiB", "MiB", "GiB"};
  double scale = 1;
  std::size_t unit = 0;
  for (; unit + 1 < kUnits.size() && static_cast<double>(all) >= scale * 1024; ++unit) {
    scale *= 1024;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << static_cast<double>(done) / scale
       << " of " << static_cast<double>(all) / scale << ' ' << kUnits[unit];
  return text.str();
}

/// One direction of an exchange.
template <class Byte>
struct Transfer {
  Connection* connection;
  std::span<Byte> bytes;
  std::size_t done = 0;

  bool finished() const { return done == bytes.size(); }

  /// Moves the bytes that can be moved now; returns whether there were any.
  bool move() {
    if (finished()) return false;
    const auto rest = bytes.subspan(done);
    try {
      std::size_t moved = 0;
      if constexpr (std::is_const_v<Byte>) {
        moved = connection->send_data(rest);
      } else {
        moved = connection->receive_data(rest);
      }
      done += moved;
      return moved > 0;
    } catch (const ConnectionLost& lost) {
      throw ConnectionLost(lost.rank(), lost.what() + (" after " + described()));
    } catch (const Error& error) {
      throw Error(error.kind(), error.what() + (" after " + described()));
    }
  }

  std::string described() const {
    return progress(done, bytes.size()) + (std::is_const_v<Byte> ? " sent" : " received");
  }
};

}  // namespace

Connection::Connection(SocketSource& source, int rank, std::size_t width, std::string peer,
                       bool is_checked, std::shared_ptr<Network> network)
    : source_(source),
      rank_(rank),
      width_(width),
      peer_(std::move(peer)),
      is_checked_(is_checked),
      network_(std::move(network)) {}

/// Takes the sockets from the source; returns false if there are none yet.
bool Connection::open(bool needed) {
  if (!sockets_.empty()) return true;
  std::vector<Socket> sockets = source_.take(rank_, needed);
  if (sockets.empty()) return false;
  if (sockets.size() != width_) {
    throw Error(ErrorKind::kInternal, std::to_string(sockets.size()) + " sockets lead to " + peer_ +
                                          ", and not " + std::to_string(width_));
  }
  for (const Socket& socket : sockets) {
    make_non_blocking(socket.get());
    const int on = 1;
    if (is_tcp(socket.get()) &&
        ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0) {
      throw_errno("setsockopt(TCP_NODELAY)");
    }
  }
  is_checked_ = is_checked_ && !sockets.front().tls();
  if (network_) stream_ = network_->stream(sockets.front().get(), rank_, peer_);
  sockets_ = std::move(sockets);
  if (stream_ && send(stream_->greeting()) < stream_->greeting().size()) {
    throw Error(ErrorKind::kInternal, "a new socket to " + peer_ + " takes no greeting");
  }
  return true;
}

/// Receives the peer's greeting, if there is a network; returns whether all of it has arrived.
bool Connection::meet() {
  while (stream_ && !is_met_) {
    const auto room = stream_->greeting_room();
    const std::size_t received = receive(room);
    stream_->greeted(received);
    is_met_ = stream_->greeting_room().empty();
    if (received < room.size()) break;
  }
  return !stream_ || is_met_;
}

/// Calls move_part(socket, part of the bytes) until it moves less than its part.
template <class Byte, class Move>
std::size_t Connection::move(std::span<Byte> bytes, Position& position, Move&& move_part) {
  const bool stripes = sockets_.size() > 1;
  std::size_t done = 0;
  while (done < bytes.size()) {
    const auto rest = bytes.subspan(done);
    const auto part = stripes ? rest.first(std::min(rest.size(), position.left)) : rest;
    const std::size_t moved = move_part(sockets_[position.socket], part);
    done += moved;
    if (stripes && (position.left -= moved) == 0) {
      position = {(position.socket + 1) % sockets_.size(), kStripeBytes};
    }
    if (moved < part.size()) break;
  }
  return done;
}

/// Sends bytes by move_part(bytes), in frames if the connection is checked.
template <class Move>
std::size_t Connection::send_by(std::span<const std::byte> bytes, Frames& frames,
                                Move&& move_part) {
  return is_checked_ ? frames.writer.send(bytes, move_part) : move_part(bytes);
}

/// Receives bytes by move_part(bytes), in frames if the connection is checked.
template <class Move>
std::size_t Connection::receive_by(std::span<std::byte> bytes, Frames& frames, Move&& move_part) {
  const auto move = [&](std::span<std::byte> room) -> std::size_t {
    if (failpoint("data.receive", rank_)) return 0;
    const std::size_t received = move_part(room);
    if (received > 0 && failpoint("data.received", rank_)) room[received - 1] ^= std::byte{1};
    return received;
  };
  if (!is_checked_) return move(bytes);
  if (const auto arrived = frames.reader.receive(bytes, move)) return *arrived;
  throw Error(ErrorKind::kInternal, "data from " + peer_ +
                                        " arrived damaged: their checksum is not that of the bytes "
                                        "sent (TORCH_RING_CHECKSUM). A network card, a switch or "
                                        "the memory of one of the two hosts is broken");
}

std::size_t Connection::try_send(std::span<const std::byte> bytes) {
  if (!open(true)) return 0;
  return send_by(bytes, frames_, [&](auto part) { return send(part); });
}

std::size_t Connection::try_receive(std::span<std::byte> bytes) {
  if (!open(true) || !meet()) return 0;
  return receive_by(bytes, frames_, [&](auto room) { return receive(room); });
}

std::size_t Connection::send_data(std::span<const std::byte> bytes) {
  if (!network_) return try_send(bytes.first(std::min(bytes.size(), kMoveBytes)));
  if (!open(true) || !meet()) return 0;
  take_acknowledgements();
  return send_by(bytes, data_frames_, [&](auto part) { return stream_->send(part); });
}

std::size_t Connection::receive_data(std::span<std::byte> bytes) {
  if (!network_) return try_receive(bytes.first(std::min(bytes.size(), kMoveBytes)));
  if (!open(true) || !meet()) return 0;
  received_ += receive_by(bytes.subspan(received_), data_frames_,
                          [&](auto room) { return stream_->receive(room); });
  return acknowledge() ? std::exchange(received_, 0) : 0;
}

/// Receives acknowledgements, and no byte beyond those that are due.
void Connection::take_acknowledgements() {
  std::array<std::byte, 64> bytes;
  while (const std::size_t due = std::min(stream_->unacknowledged(), bytes.size())) {
    const std::size_t come = receive(std::span(bytes).first(due));
    if (!std::ranges::all_of(std::span(bytes).first(come),
                             [](std::byte byte) { return byte == kAcknowledgement; })) {
      throw Error(ErrorKind::kInternal, "an acknowledgement of " + peer_ + " arrived damaged");
    }
    stream_->acknowledged(come);
    if (come < due) return;
  }
}

/// Acknowledges the received messages; returns whether the sockets took all acknowledgements.
bool Connection::acknowledge() {
  owed_ += stream_->take_received();
  if (owed_ > 0) owed_ -= send(std::vector(owed_, kAcknowledgement));
  return owed_ == 0;
}

pollfd Connection::send_poll() const {
  if (!stream_) return {send_fd(), POLLOUT, 0};
  const bool expects = !is_met_ || stream_->unacknowledged() > 0;
  return {receive_fd(), static_cast<short>(expects ? POLLIN : POLLRDHUP), 0};
}

pollfd Connection::receive_poll() const {
  if (owed_ > 0) return {send_fd(), POLLOUT, 0};
  return {receive_fd(), static_cast<short>(stream_ && is_met_ ? POLLRDHUP : POLLIN), 0};
}

std::size_t Connection::send(std::span<const std::byte> bytes) {
  return move(bytes, outgoing_, [&](Socket& socket, std::span<const std::byte> part) {
    const auto sent = socket.send(part);
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (!try_later(errno)) throw_failed(rank_, peer_, errno);
    return std::size_t{0};
  });
}

std::size_t Connection::receive(std::span<std::byte> bytes) {
  return move(bytes, incoming_, [&](Socket& socket, std::span<std::byte> part) {
    const auto received = socket.receive(part);
    if (received > 0) return static_cast<std::size_t>(received);
    if (received == 0) throw ConnectionLost(rank_, "connection to " + peer_ + " closed");
    if (!try_later(errno)) throw_failed(rank_, peer_, errno);
    return std::size_t{0};
  });
}

bool Connection::readable() {
  if (!open(false) || failpoint("data.receive", rank_)) return false;
  try {
    if (!meet()) return false;
  } catch (const ConnectionLost&) {
    return true;  // try_receive() throws the cause
  }
  if (sockets_[incoming_.socket].has_received()) return true;
  pollfd socket{receive_fd(), POLLIN, 0};
  return ::poll(&socket, 1, 0) > 0;
}

namespace {

/// Takes back the memory that unfinished transfers have lent.
template <class Byte>
void abandon(std::span<Transfer<Byte>> transfers) {
  for (const auto& transfer : transfers) {
    if (!transfer.finished()) transfer.connection->abandon_data();
  }
}

/// Runs the transfers of an exchange. `fds`: room for one descriptor of each.
void run(std::span<Transfer<const std::byte>> sends, std::span<Transfer<std::byte>> receives,
         std::span<pollfd> fds, const Waiter& waiter,
         const std::function<void(std::size_t)>& received) try {
  const auto finished = [](const auto& transfer) { return transfer.finished(); };
  const auto silence = [&]() -> Standstill {
    std::vector<int> ranks;
    std::ostringstream text;
    text << "no progress for " << in_seconds(waiter.timeout()) << " (TORCH_RING_TIMEOUT):";
    const char* separator = " ";
    const auto add = [&](const auto& transfer, const char* direction) {
      if (transfer.finished()) return;
      ranks.push_back(transfer.connection->rank());
      text << separator << transfer.described() << direction << transfer.connection->peer();
      if (const auto trouble = transfer.connection->trouble(); !trouble.empty()) {
        text << " (no connection: " << trouble << ')';
      }
      separator = ", ";
    };
    for (const auto& send : sends) add(send, " to ");
    for (const auto& receive : receives) add(receive, " from ");
    return {std::move(ranks), text.str()};
  };

  Network* network = nullptr;
  const auto look = [&](const auto& transfer) {
    if (!transfer.finished()) network = transfer.connection->network();
  };
  std::ranges::for_each(sends, look);
  std::ranges::for_each(receives, look);

  while (!std::ranges::all_of(sends, finished) || !std::ranges::all_of(receives, finished)) {
    bool progress = false;
    const auto moved = [&] {
      for (auto& send : sends) progress |= send.move();
      bool arrived = false;
      for (auto& receive : receives) arrived |= receive.move();
      progress |= arrived;
      if (arrived && received) {
        received(std::ranges::min(receives, {}, &Transfer<std::byte>::done).done);
      }
      // Set here, because a connection may just have got its sockets; the wait then polls these
      // `fds`.
      constexpr pollfd kNone{-1, 0, 0};
      auto fd = fds.begin();
      for (const auto& send : sends) {
        *fd++ = send.finished() ? kNone : send.connection->send_poll();
      }
      for (const auto& receive : receives) {
        *fd++ = receive.finished() ? kNone : receive.connection->receive_poll();
      }
      return progress;
    };
    waiter.wait(moved, silence, fds, network);
  }
} catch (...) {
  abandon(sends);
  abandon(receives);
  throw;
}

}  // namespace

void exchange(std::span<const OutgoingBytes> outgoing, std::span<const IncomingBytes> incoming,
              const Waiter& waiter, const std::function<void(std::size_t)>& received) {
  std::vector<Transfer<const std::byte>> sends;
  for (const auto& [to, bytes] : outgoing) sends.push_back({to, bytes});
  std::vector<Transfer<std::byte>> receives;
  for (const auto& [from, bytes] : incoming) receives.push_back({from, bytes});
  std::vector<pollfd> fds(sends.size() + receives.size());
  run(sends, receives, fds, waiter, received);
}

void exchange(Connection* to, std::span<const std::byte> outgoing, Connection* from,
              std::span<std::byte> incoming, const Waiter& waiter,
              const std::function<void(std::size_t)>& received) {
  std::array<Transfer<const std::byte>, 1> sends{{{to, outgoing}}};
  std::array<Transfer<std::byte>, 1> receives{{{from, incoming}}};
  std::array<pollfd, 2> fds{};
  run(sends, receives, fds, waiter, received);
}

}  // namespace torch_ring
