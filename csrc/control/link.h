// SPDX-License-Identifier: Apache-2.0
// ControlLink: one control connection.
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "control/message.h"
#include "core/clock.h"
#include "transport/socket.h"

namespace torch_ring {

/// The descriptors of one poll(). Made anew for each poll(). The slot that add() returned gives the
/// descriptor's events afterwards.
class PollSet {
 public:
  /// A slot of no descriptor: never ready.
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::size_t add(int fd, short events) {
    fds_.push_back({fd, events, 0});
    return fds_.size() - 1;
  }

  void wait(Clock::time_point deadline) {
    using std::chrono::milliseconds;
    const auto now = Clock::now();
    const auto left = deadline <= now ? milliseconds(0)
                                      : std::min(std::chrono::ceil<milliseconds>(deadline - now),
                                                 milliseconds(60'000));
    if (::poll(fds_.data(), fds_.size(), static_cast<int>(left.count())) < 0) {
      for (pollfd& fd : fds_) fd.revents = 0;
    }
  }

  /// Whether wait() has found one of the slot's events, or an error.
  bool ready(std::size_t slot) const { return slot < fds_.size() && fds_[slot].revents != 0; }

 private:
  std::vector<pollfd> fds_;
};

/// Sends and receives messages over an authenticated non-blocking socket, each direction in order.
/// Bytes that the socket does not take at once wait in a queue, so nothing is dropped.
///
/// Thread: one at a time. Blocking: no.
class ControlLink {
 public:
  /// The most bytes that wait for a peer that does not read; far more than all news together.
  static constexpr std::size_t kQueueBytes = 16u << 20;

  /// `size`: the number of ranks.
  ControlLink(int peer, Socket socket, int size, Clock::time_point now);

  int peer() const noexcept { return peer_; }
  int fd() const noexcept { return socket_.get(); }
  const TlsStream* tls() const noexcept { return socket_.tls(); }
  /// The time of the last received bytes.
  Clock::time_point heard() const noexcept { return heard_; }

  /// Appends to the queue; flush() sends it, with all messages before it, from `due` on.
  void queue(const Message& message, Clock::time_point due);
  /// Sends the due bytes that the socket takes.
  void flush(Clock::time_point now);
  /// Whether something waits in the queue.
  bool pending() const noexcept { return !outgoing_.empty(); }
  /// The time to call flush(), unless the socket takes no more: then poll() tells. The past if
  /// ready() does not need poll().
  Clock::time_point due() const {
    if (socket_.has_received()) return heard_;
    return blocked_ ? Clock::time_point::max() : due_;
  }
  /// Whether kQueueBytes have been passed: the peer does not read.
  bool overflown() const noexcept { return outgoing_.size() > kQueueBytes; }

  /// The messages that have arrived; call it when ready(). Errors: Error(kPeerLost) if the bytes
  /// are not a message.
  std::vector<Message> receive(Clock::time_point now);
  /// Whether the stream has ended: the peer has closed it, or it was reset.
  bool ended() const noexcept { return ended_; }
  /// Whether the connection has failed, and the peer has not ended its stream before.
  bool was_reset() const noexcept { return was_reset_; }

  /// Sends no more: the peer receives the end of the stream after all that was sent. Idempotent.
  void end_sending() noexcept;
  /// Receives the bytes that have arrived, and drops them; at the end of the stream the link has
  /// ended().
  void drain() noexcept;
  /// Ends the link on this side.
  void close() noexcept;

  void add_to(PollSet& polls);
  bool ready(const PollSet& polls) const { return polls.ready(slot_) || socket_.has_received(); }

 private:
  const int peer_;
  Socket socket_;
  MessageParser parser_;
  Clock::time_point heard_;
  std::string outgoing_;
  Clock::time_point due_ = Clock::time_point::max();
  bool blocked_ = false;  // the socket takes no more for now
  bool ended_ = false;
  bool deaf_ = false;  // the peer receives no more; its last bytes may still be here
  bool was_reset_ = false;
  bool sends_ = true;
  std::size_t slot_ = PollSet::kNone;
};

}  // namespace torch_ring
