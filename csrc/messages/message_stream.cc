// SPDX-License-Identifier: Apache-2.0
#include "messages/message_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace torch_ring {

namespace {

constexpr std::size_t kFrameBytes = sizeof(MessageFrame);

// Most bytes in one direction at a time: other streams have their turn.
constexpr std::size_t kTurnBytes = 1u << 20;

}  // namespace

void MessageStream::queue(const MessageFrame& frame, std::span<const std::byte> bytes,
                          std::shared_ptr<MessageRequest> request) {
  Queued queued{frame, std::vector<std::byte>(kFrameBytes), bytes, std::move(request)};
  std::memcpy(queued.head.data(), &frame, kFrameBytes);
  if (bytes.size() <= kWholeBytes) {  // one packet
    queued.head.insert(queued.head.end(), bytes.begin(), bytes.end());
    queued.bytes = {};
  }
  if (queue_.empty()) moved_ = Clock::now();
  queue_.push_back(std::move(queued));
}

bool MessageStream::advance() {
  const bool received = receive();
  bool sent = false;
  try {
    sent = !cannot_send_ && send();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    cannot_send_ = true;  // the peer's last bytes are still to be received
  }
  if (sent || received) moved_ = Clock::now();
  return sent || received;
}

bool MessageStream::send() {
  std::size_t moved = 0;
  while (!queue_.empty() && moved < kTurnBytes) {
    Queued& next = queue_.front();
    const std::size_t head = next.head.size();
    const std::span<const std::byte> rest = next.done < head
                                                ? std::span(next.head).subspan(next.done)
                                                : next.bytes.subspan(next.done - head);
    const auto part = rest.first(std::min(rest.size(), kTurnBytes));
    const std::size_t sent = part.empty() ? 0 : connection_->try_send(part);
    next.done += sent;
    moved += sent;
    if (next.done == head + next.bytes.size()) {
      if (next.request) sent_.push_back(std::move(next.request));
      queue_.pop_front();
    } else if (sent < part.size()) {
      break;
    }
  }
  return moved > 0;
}

bool MessageStream::receive() {
  std::size_t moved = 0;
  while (moved < kTurnBytes) {
    const bool in_frame = received_ < kFrameBytes;
    const auto rest = in_frame ? std::as_writable_bytes(std::span(&incoming_, 1)).subspan(received_)
                               : room_.subspan(received_ - kFrameBytes);
    const auto part = rest.first(std::min(rest.size(), kTurnBytes));
    const std::size_t arrived = connection_->try_receive(part);
    received_ += arrived;
    moved += arrived;
    if (arrived < part.size()) break;
    if (in_frame) room_ = handlers_.begin(incoming_);
    if (received_ == kFrameBytes + room_.size()) {
      received_ = 0;
      handlers_.end(incoming_);
    }
  }
  return moved > 0;
}

std::vector<std::shared_ptr<MessageRequest>> MessageStream::take_unsent() {
  std::vector<std::shared_ptr<MessageRequest>> unsent;
  for (Queued& queued : queue_) {
    if (queued.request) unsent.push_back(std::move(queued.request));
  }
  queue_.clear();
  return unsent;
}

bool MessageStream::is_open(bool look) {
  if (look && connection_->receive_fd() < 0) connection_->readable();
  return connection_->receive_fd() >= 0;
}

void MessageStream::add_to(std::vector<pollfd>& fds) const {
  fds.push_back({connection_->receive_fd(), POLLIN, 0});
  if (!queue_.empty() && !cannot_send_) fds.push_back({connection_->send_fd(), POLLOUT, 0});
}

Clock::time_point MessageStream::still_since() const {
  // A receiver may not expect a kWhole yet, so only a kData counts.
  const bool sends = !queue_.empty() && queue_.front().frame.kind == MessageFrame::Kind::kData;
  return sends || received_ > kFrameBytes ? moved_ : Clock::time_point::max();
}

}  // namespace torch_ring
