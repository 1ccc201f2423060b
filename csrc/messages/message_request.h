// SPDX-License-Identifier: Apache-2.0
// MessageRequest: one end of a pending message, at its sender or at its receiver.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/types.h"

namespace torch_ring {

/// One message of a rank, with its times; MessageCounters: sums over all that ended. Times are
/// nanoseconds of Clock; 0: not yet.
struct MessageRecord {
  enum class State : std::uint8_t {
    kPosted,   // this rank waits for the other one
    kMatched,  // a receive has its message, or a long send its receive: the bytes move
    kFinished,
    kFailed,
  };

  std::uint64_t number = 0;  // in the order of this rank's requests, from 1
  State state = State::kPosted;
  bool is_send = true;
  int peer = -1;  // the other rank of the set; -1: a receive from any rank, without a message yet
  int tag = 0;
  DType dtype = DType::kUInt8;
  std::uint64_t bytes = 0;  // of the message; the most that a receive without one accepts

  std::int64_t posted = 0;
  std::int64_t matched = 0;  // stays 0 for a short send, which does not wait
  std::int64_t finished = 0;

  std::string error;  // of a failed one

  /// "receive of float32, 16 bytes, tag 3"
  std::string describe() const {
    return std::string(is_send ? "send" : "receive") + " of " + name_of(dtype) + ", " +
           std::to_string(bytes) + " bytes, tag " + std::to_string(tag);
  }
};

struct MessageTotals {
  struct Sums {
    std::uint64_t messages = 0;
    std::uint64_t failed = 0;  // of these
    std::uint64_t bytes = 0;   // of the others
  };
  Sums sent;
  Sums received;
};

/// Thread: any. Blocking: no.
class MessageCounters {
 public:
  void finished(bool is_send, std::uint64_t bytes) {
    const std::scoped_lock lock(mutex_);
    MessageTotals::Sums& sums = of(is_send);
    ++sums.messages;
    sums.bytes += bytes;
  }

  void failed(bool is_send) {
    const std::scoped_lock lock(mutex_);
    MessageTotals::Sums& sums = of(is_send);
    ++sums.messages;
    ++sums.failed;
  }

  MessageTotals totals() const {
    const std::scoped_lock lock(mutex_);
    return totals_;
  }

 private:
  MessageTotals::Sums& of(bool is_send) { return is_send ? totals_.sent : totals_.received; }

  mutable std::mutex mutex_;  // guards the member below; taken after a request's mutex
  MessageTotals totals_;
};

/// The parameters of one send or receive.
struct MessageSpec {
  bool is_send = true;
  std::optional<int> peer;  // the other rank of the set; none: a receive from any rank
  int tag = 0;
  DType dtype = DType::kUInt8;  // only compared with the peer's
  std::span<std::byte> memory;  // sent or received into; nobody else touches it until the end
  /// The time when a pending request fails; max(): never.
  Clock::time_point deadline = Clock::time_point::max();
  /// Keeps the memory alive until the end.
  std::shared_ptr<void> owner = nullptr;
  /// Called when a receive's bytes have arrived, before its end is visible. It may throw.
  std::function<void()> received = {};
};

/// Thread: any. Blocking: wait() and wait_until() only. Errors: the request's, from these two.
class MessageRequest {
 public:
  /// Called by a waiting thread, at least every 50 ms; its exception ends the wait.
  using Interrupt = std::function<void()>;

  explicit MessageRequest(MessageSpec spec) : spec_(std::move(spec)) {}

  bool done() const;

  /// Returns when the request has ended. The memory of an ended send may be written to again; its
  /// message may still be on the way. The request's own deadline bounds the wait.
  void wait(const Interrupt& interrupt = {});
  /// Returns whether it has ended by `deadline`. If not, it stays pending.
  bool wait_until(Clock::time_point deadline, const Interrupt& interrupt = {});

  /// Its Error; null if it has not failed.
  std::exception_ptr error() const;

  /// The rank of the set that has sent the message, and its bytes. Precondition: a receive that has
  /// ended without an error.
  int source() const;
  std::size_t bytes() const;

  /// "receive of float32, 16 bytes, tag 3"
  std::string describe() const;

  /// Its record at this moment.
  MessageRecord record() const;

  /// Sets its number, from 1, and the `counters` that count its end. Precondition: no other thread
  /// has the request yet.
  void count_with(std::shared_ptr<MessageCounters> counters, std::uint64_t number);

  const MessageSpec& spec() const noexcept { return spec_; }

 private:
  friend class MessageProtocol;
  friend class PointToPoint;

  /// A receive has got its message from `peer`, or a send its receive there.
  void matched(int peer, std::size_t bytes);

  /// Ends it; later calls do nothing. Thread: one at a time.
  void finish(std::optional<Error> error = std::nullopt);
  void finish(int source, std::size_t bytes);

  MessageSpec spec_;  // its owner is reset at the end

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable ended_;
  bool done_ = false;
  std::optional<Error> error_;
  int source_ = -1;
  std::size_t bytes_ = 0;
  std::shared_ptr<MessageCounters> counters_;  // null: not counted
  std::uint64_t number_ = 0;                   // in the order of requests, from 1
  Clock::time_point posted_{};
  Clock::time_point matched_{};
  Clock::time_point finished_{};
};

/// The flight recorder of a PointToPoint: a rank's last messages. It keeps the requests themselves,
/// which release their tensors when they end.
///
/// Thread: any. Blocking: no. Errors: none but bad_alloc.
class MessageRecorder {
 public:
  static constexpr std::size_t kMessages = 2000;

  /// Precondition: no other thread has the request yet.
  void posted(const std::shared_ptr<MessageRequest>& request);

  /// The last messages, oldest first, including pending ones.
  std::vector<MessageRecord> records() const;

  /// Of all messages that have ended.
  MessageTotals totals() const { return counters_->totals(); }

 private:
  const std::shared_ptr<MessageCounters> counters_ = std::make_shared<MessageCounters>();
  mutable std::mutex mutex_;  // guards the members below
  std::deque<std::shared_ptr<MessageRequest>> last_;
  std::uint64_t posted_ = 0;
};

}  // namespace torch_ring
