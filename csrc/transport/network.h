// Network: carries the data of exchanges in place of the sockets of connections.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace torch_ring {

/// An ordered stream of messages each way, beside the sockets of one connection, which carry its
/// greetings and acknowledgements.
///
/// Bytes are *lent*: until they are done or abandon() has returned, they stay where they are and
/// unchanged, and each call offers all that are not done. So they can be moved without a copy. What
/// is sent is done when the peer has acknowledged it: nothing is under way any more that a later
/// call would have to move.
///
/// Thread: one at a time. Blocking: no. Errors: ConnectionLost when the stream fails, or the socket
/// has ended; Error(kMismatch) if the peer's greeting is not the peer's; Error(kInternal) without
/// resources.
class NetworkStream {
 public:
  virtual ~NetworkStream() = default;

  /// The first bytes that the sockets carry each way: where this end is reached.
  virtual std::span<const std::byte> greeting() const = 0;
  /// Where to receive the peer's; empty when all of it has come.
  virtual std::span<std::byte> greeting_room() = 0;
  /// Takes note of bytes received there.
  virtual void greeted(std::size_t bytes) = 0;

  /// Sends or receives what can be moved now; returns the number of bytes at the front of `bytes`
  /// that are done, maybe 0. Only after the greetings.
  virtual std::size_t send(std::span<const std::byte> bytes) = 0;
  virtual std::size_t receive(std::span<std::byte> bytes) = 0;

  /// Messages that were sent, and that the peer has not acknowledged; notes that it has.
  virtual std::size_t unacknowledged() const = 0;
  virtual void acknowledged(std::size_t messages) = 0;
  /// Messages that have been received since the last call, to be acknowledged.
  virtual std::size_t take_received() = 0;

  /// Lets go of bytes that were lent. If there were any, no more can be sent or received.
  virtual void abandon() noexcept = 0;
};

/// The streams of one communicator.
///
/// Thread: one at a time. Blocking: no. Errors: Error(kInternal).
class Network {
 public:
  virtual ~Network() = default;

  /// The stream to `rank`, beside an authenticated socket that outlives it. `peer` is the label of
  /// errors. The network outlives its streams.
  virtual std::unique_ptr<NetworkStream> stream(int socket, int rank, const std::string& peer) = 0;

  /// Call before a sleep. Moves what can be moved; returns whether to sleep now. Otherwise
  /// something has moved since the last call: look at the streams once more.
  virtual bool arm() = 0;

  /// Readable when there is something to move; -1 before there is a stream.
  virtual int fd() const = 0;
};

}  // namespace torch_ring
