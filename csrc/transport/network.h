// SPDX-License-Identifier: Apache-2.0
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
/// Bytes are *lent*, so that they can be moved without a copy: until they are done or abandon() has
/// returned, the caller leaves them in place and unchanged, and each call offers all that are not
/// done. Sent bytes are done when the peer has acknowledged them: then no later call has to move
/// anything for them.
///
/// Thread: one at a time. Blocking: no. Errors: ConnectionLost when the stream fails, or the socket
/// has ended; Error(kMismatch) if the peer's greeting is invalid; Error(kInternal) without
/// resources.
class NetworkStream {
 public:
  virtual ~NetworkStream() = default;

  /// The first bytes on the sockets in each direction: the address of this end.
  virtual std::span<const std::byte> greeting() const = 0;
  /// The room for the peer's greeting; empty when all of it has arrived.
  virtual std::span<std::byte> greeting_room() = 0;
  /// Records bytes received into greeting_room().
  virtual void greeted(std::size_t bytes) = 0;

  /// Sends or receives as much as possible now; returns the number of bytes at the front of `bytes`
  /// that are done, maybe 0. Only after the greetings.
  virtual std::size_t send(std::span<const std::byte> bytes) = 0;
  virtual std::size_t receive(std::span<std::byte> bytes) = 0;

  /// The number of sent messages without an acknowledgement; acknowledged() reduces it.
  virtual std::size_t unacknowledged() const = 0;
  virtual void acknowledged(std::size_t messages) = 0;
  /// The number of messages received since the last call, for acknowledgement.
  virtual std::size_t take_received() = 0;

  /// Ends the loan of all bytes. If there were any, the stream can send and receive no more.
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

  /// Call before a sleep. Moves as much as possible; returns whether to sleep now. Otherwise
  /// something has moved since the last call: check the streams once more.
  virtual bool arm() = 0;

  /// Readable when there is something to move; -1 before there is a stream.
  virtual int fd() const = 0;
};

}  // namespace torch_ring
