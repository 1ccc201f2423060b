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

/// The sockets were connected, and their peer authenticated, before they came here
/// (torch_ring/connections). As a rule there is one. The stream goes over several in turns,
/// kStripeBytes over each: where what limits a transfer is a limit of each flow (of a cloud's
/// network, say, or of a window on a long way), they carry more than one does.
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

  /// Sends or receives what the sockets take or have now; returns the bytes moved, perhaps 0.
  std::size_t try_send(std::span<const std::byte> bytes);
  std::size_t try_receive(std::span<std::byte> bytes);

  /// Whether at least one byte can be received now (or the stream has ended).
  bool readable() const;

  /// How many sockets there are.
  std::size_t width() const noexcept { return sockets_.size(); }

  /// The sockets that the next byte goes over: what to poll. Another after each stripe.
  int send_fd() const { return sockets_[outgoing_.socket].get(); }
  int receive_fd() const { return sockets_[incoming_.socket].get(); }
  const std::string& peer() const noexcept { return peer_; }

 private:
  /// Where a direction of the stream is.
  struct Position {
    std::size_t socket = 0;
    std::size_t left = kStripeBytes;  // of the stripe
  };
  template <class Byte, class Move>
  std::size_t move(std::span<Byte> bytes, Position& position, Move&& move_part);

  std::vector<Fd> sockets_;
  Position outgoing_;
  Position incoming_;
  std::string peer_;
};

/// Sends `outgoing` through `to` and receives `incoming` from `from` at the same time, so that a
/// ring in which everybody sends cannot block; either may be empty (then its connection may be
/// null). `received(bytes)`, when given, is called as the front of `incoming` grows, with the bytes
/// that have arrived in all, so that a reduction overlaps the transfer.
/// Blocking: until both are done. Errors: Connection's; Error(kTimeout) when neither direction has
/// moved for the waiter's timeout, saying how much of what had moved.
void exchange(Connection* to, std::span<const std::byte> outgoing, Connection* from,
              std::span<std::byte> incoming, const Waiter& waiter,
              const std::function<void(std::size_t)>& received = {});

}  // namespace torch_ring
