// SPDX-License-Identifier: Apache-2.0
// MessageStream: the frames of the messages that one rank sends to another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "core/clock.h"
#include "messages/message_request.h"
#include "transport/connection.h"

namespace torch_ring {

/// The header of a frame, in the machine's byte order.
///
/// A short message is a kWhole, with its bytes. A long one is a kOffer; the receiver answers with a
/// kAccept when it has memory for it, and the sender then sends a kData, with the bytes. A receiver
/// whose receive does not fit answers with a kRefuse.
struct MessageFrame {
  enum class Kind : std::uint8_t {
    kWhole = 1,  // from the sender
    kOffer,
    kData,
    kAccept,  // from the receiver
    kRefuse,
  };

  Kind kind = Kind::kWhole;
  DType dtype = DType::kUInt8;        // of the message
  DType asked_dtype = DType::kUInt8;  // kRefuse: of the receive
  std::uint8_t zero = 0;
  std::int32_t tag = 0;
  std::uint64_t number = 0;       // of the message, counted by its sender
  std::uint64_t bytes = 0;        // of the message
  std::uint64_t asked_bytes = 0;  // kRefuse: of the receive
};
static_assert(sizeof(MessageFrame) == 32 && std::is_trivially_copyable_v<MessageFrame>);

/// One connection: frames with bytes in the direction of the messages, frames without bytes in the
/// other. Each end sends and receives as much as the connection allows.
///
/// Thread: the messages'. Blocking: no. Errors: Connection's.
class MessageStream {
 public:
  /// Messages up to this size go at once, and the receiver keeps them until their receives are
  /// posted. Longer ones wait for the receiver's memory: a copy of 16 KiB costs less than that.
  static constexpr std::size_t kWholeBytes = 16u << 10;

  struct Handlers {
    /// A frame has arrived: returns the room for the bytes that follow it.
    std::function<std::span<std::byte>(const MessageFrame&)> begin;
    /// The bytes of the frame have arrived.
    std::function<void(const MessageFrame&)> end;
  };

  /// `connection`: to the peer.
  MessageStream(std::unique_ptr<Connection> connection, Handlers handlers)
      : connection_(std::move(connection)), handlers_(std::move(handlers)) {}

  /// Sends a frame after the queued ones, with bytes that stay in place. `request`, which may be
  /// null, ends when they are sent (take_sent()).
  void queue(const MessageFrame& frame, std::span<const std::byte> bytes = {},
             std::shared_ptr<MessageRequest> request = nullptr);

  /// Sends and receives as much as possible now; returns whether it moved anything.
  bool advance();

  /// The requests whose frames have been sent, and those whose frames have not; each once.
  std::vector<std::shared_ptr<MessageRequest>> take_sent() { return std::exchange(sent_, {}); }
  std::vector<std::shared_ptr<MessageRequest>> take_unsent();

  /// Whether it has sockets. `look`: takes sockets that the peer has made, and requests none.
  bool is_open(bool look);

  /// Appends the descriptors to poll.
  void add_to(std::vector<pollfd>& fds) const;

  /// The time since which a message whose bytes both ends move has stood still; max() if there is
  /// none.
  Clock::time_point still_since() const;

 private:
  struct Queued {
    MessageFrame frame;
    std::vector<std::byte> head;  // the frame, and the bytes of a short message
    std::span<const std::byte> bytes;
    std::shared_ptr<MessageRequest> request;
    std::size_t done = 0;
  };

  bool send();
  bool receive();

  const std::unique_ptr<Connection> connection_;
  const Handlers handlers_;
  std::deque<Queued> queue_;
  std::vector<std::shared_ptr<MessageRequest>> sent_;
  bool cannot_send_ = false;  // the peer has closed it

  MessageFrame incoming_;
  std::span<std::byte> room_;  // for the bytes of the incoming frame
  std::size_t received_ = 0;   // of the frame and its bytes
  Clock::time_point moved_ = Clock::now();
};

}  // namespace torch_ring
