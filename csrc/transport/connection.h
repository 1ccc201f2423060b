// SPDX-License-Identifier: Apache-2.0
// Connection: an ordered byte stream to one peer over connected sockets.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/checked_stream.h"
#include "transport/network.h"
#include "transport/socket.h"
#include "transport/socket_source.h"
#include "transport/waiter.h"

namespace torch_ring {

/// The first byte to send or receive makes the sockets and authenticates the peer (SocketSource).
/// Before that there is nothing to poll, and the Waiter is woken when the sockets are there.
/// Usually there is one socket. Several carry the stream in turn, kStripeBytes each, which is
/// faster where the network limits each flow (a cloud's limit, or the TCP window of a long path).
///
/// TCP's own checksum has 16 bits, and network cards compute it, so data damaged by a card, a
/// switch or a host's memory passes it now and then. A checked connection sends a CRC-32C with
/// every frame (checked_stream.h).
///
/// With a Network the data of exchange() travel over it, in messages. Their acknowledgements go
/// over the sockets, a byte each, and so stay in order with the bytes of try_send(). The network's
/// greetings are the first bytes on the sockets.
///
/// Thread: one at a time. Blocking: never.
/// Errors: Error(kPeerLost) naming the peer when the stream ends or a socket fails;
/// Error(kInternal) naming it when its data arrives damaged; the source's.
class Connection {
 public:
  static constexpr std::size_t kStripeBytes = 64u << 10;

  /// Takes `width` stream sockets (TCP, or Unix sockets in tests) to `rank` from `source`, which
  /// outlives it, when they are needed, and makes them non-blocking, with TCP_NODELAY when they are
  /// TCP. `peer` is the label of errors: "rank 2 (10.0.0.7, pid 41)". `is_checked`, and whether
  /// there is a `network`, are the same at both ends.
  Connection(SocketSource& source, int rank, std::size_t width, std::string peer,
             bool is_checked = false, std::shared_ptr<Network> network = nullptr);

  /// Sends or receives the bytes that the sockets take or have now; returns their number, maybe 0.
  std::size_t try_send(std::span<const std::byte> bytes);
  std::size_t try_receive(std::span<std::byte> bytes);

  /// The same for the bytes of an exchange, which are lent (NetworkStream).
  std::size_t send_data(std::span<const std::byte> bytes);
  std::size_t receive_data(std::span<std::byte> bytes);
  void abandon_data() noexcept {
    if (stream_) stream_->abandon();
  }

  /// Whether at least one byte can be received now (or the stream has ended). Makes no sockets.
  bool readable();

  /// The peer's rank.
  int rank() const noexcept { return rank_; }

  /// The number of sockets.
  std::size_t width() const noexcept { return width_; }

  /// The sockets of the next byte in each direction, to poll; -1 as long as there are none. They
  /// change after each stripe.
  int send_fd() const { return fd(outgoing_); }
  int receive_fd() const { return fd(incoming_); }

  /// The socket (-1: there is none) and event to poll for the data of an exchange in each
  /// direction, beside the network, which is null if there is none.
  pollfd send_poll() const;
  pollfd receive_poll() const;
  Network* network() const noexcept { return network_.get(); }
  const std::string& peer() const noexcept { return peer_; }

  /// Why there are no sockets yet; empty if there are some, or no reason is known.
  std::string trouble() const { return sockets_.empty() ? source_.trouble(rank_) : std::string(); }

 private:
  /// The place that one direction of the stream has reached.
  struct Position {
    std::size_t socket = 0;
    std::size_t left = kStripeBytes;  // bytes of the stripe
  };
  template <class Byte, class Move>
  std::size_t move(std::span<Byte> bytes, Position& position, Move&& move_part);

  /// The frames sent and received over the sockets, or over the network.
  struct Frames {
    CheckedWriter writer;
    CheckedReader reader;
  };
  template <class Move>
  std::size_t send_by(std::span<const std::byte> bytes, Frames& frames, Move&& move_part);
  template <class Move>
  std::size_t receive_by(std::span<std::byte> bytes, Frames& frames, Move&& move_part);

  bool open(bool needed);
  bool meet();
  std::size_t send(std::span<const std::byte> bytes);
  std::size_t receive(std::span<std::byte> bytes);
  void take_acknowledgements();
  bool acknowledge();
  int fd(Position position) const {
    return sockets_.empty() ? -1 : sockets_[position.socket].get();
  }

  SocketSource& source_;
  const int rank_;
  const std::size_t width_;
  const std::string peer_;
  bool is_checked_;  // not with TLS, which authenticates each record
  const std::shared_ptr<Network> network_;
  Frames frames_;                // of the sockets
  std::vector<Socket> sockets_;  // none before they are needed
  Position outgoing_;
  Position incoming_;
  Frames data_frames_;                     // of the network
  std::unique_ptr<NetworkStream> stream_;  // null without a network, or sockets
  bool is_met_ = false;                    // the peer's greeting has arrived
  std::size_t owed_ = 0;                   // acknowledgements for which the sockets had no room
  std::size_t received_ = 0;               // bytes that the caller gets when none is owed
};

/// The bytes of one of several peers in an exchange.
struct OutgoingBytes {
  Connection* to;
  std::span<const std::byte> bytes;
};
struct IncomingBytes {
  Connection* from;
  std::span<std::byte> bytes;
};

/// Sends and receives at the same time, so that ranks that all send cannot block. Empty bytes need
/// no connection. `received(bytes)`, if given, is called with the number of bytes that have arrived
/// from every peer by now, so that a reduction overlaps the transfer; all of `incoming` are equally
/// long then.
/// Blocking: until all is done. Errors: Connection's; Error(kTimeout) with the progress in both
/// directions, when nothing has moved for the waiter's timeout. After an error `outgoing` is no
/// longer read, and `incoming` no longer written.
void exchange(std::span<const OutgoingBytes> outgoing, std::span<const IncomingBytes> incoming,
              const Waiter& waiter, const std::function<void(std::size_t)>& received = {});

/// The same with one peer to send to and one to receive from.
void exchange(Connection* to, std::span<const std::byte> outgoing, Connection* from,
              std::span<std::byte> incoming, const Waiter& waiter,
              const std::function<void(std::size_t)>& received = {});

}  // namespace torch_ring
