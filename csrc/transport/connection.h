// Connection: an ordered byte stream to one peer over connected sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/fd.h"
#include "transport/waiter.h"

namespace torch_ring {

/// torch_ring/connections has connected the sockets and authenticated the peer. Usually there is
/// one socket. With several, the stream goes over them in turn, kStripeBytes over each. Several are
/// faster where the network limits each flow (a cloud's limit, or the TCP window of a long path).
///
/// Thread: one at a time. Blocking: never.
/// Errors: Error(kPeerLost) naming the peer when the stream ends or a socket fails.
class Connection {
 public:
  static constexpr std::size_t kStripeBytes = 64u << 10;

  /// Takes connected stream sockets (TCP, or Unix sockets in tests), in the peer's order, and makes
  /// them non-blocking, with TCP_NODELAY when they are TCP. `peer` is the label of errors:
  /// "rank 2 (10.0.0.7, pid 41)". Throws Error(kInternal) if there are none.
  Connection(std::vector<Fd> sockets, std::string peer);

  /// Sends or receives the bytes that the sockets take or have now; returns their number, maybe 0.
  std::size_t try_send(std::span<const std::byte> bytes);
  std::size_t try_receive(std::span<std::byte> bytes);

  /// Whether at least one byte can be received now (or the stream has ended).
  bool readable() const;

  /// The number of sockets.
  std::size_t width() const noexcept { return sockets_.size(); }

  /// The sockets to poll: those of the next byte in each direction. They change after each stripe.
  int send_fd() const { return sockets_[outgoing_.socket].get(); }
  int receive_fd() const { return sockets_[incoming_.socket].get(); }
  const std::string& peer() const noexcept { return peer_; }

 private:
  /// How far one direction of the stream has come.
  struct Position {
    std::size_t socket = 0;
    std::size_t left = kStripeBytes;  // bytes of the stripe
  };
  template <class Byte, class Move>
  std::size_t move(std::span<Byte> bytes, Position& position, Move&& move_part);

  std::vector<Fd> sockets_;
  Position outgoing_;
  Position incoming_;
  std::string peer_;
};

/// Sends `outgoing` to `to` and receives `incoming` from `from` at the same time, so that a ring in
/// which every rank sends cannot block. Either may be empty; its connection may be null then.
/// `received(bytes)`, if given, is called with the bytes that have arrived so far, so that a
/// reduction overlaps the transfer.
/// Blocking: until both are done. Errors: Connection's; Error(kTimeout) with the progress of both
/// directions, when neither has moved for the waiter's timeout.
void exchange(Connection* to, std::span<const std::byte> outgoing, Connection* from,
              std::span<std::byte> incoming, const Waiter& waiter,
              const std::function<void(std::size_t)>& received = {});

}  // namespace torch_ring
