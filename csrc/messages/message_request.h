// MessageRequest: the pending end of a message, at its sender or at its receiver.
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
    kMatched,  // a receive knows its message, a long send its receive: the bytes move
    kFinished,
    kFailed,
  };

  std::uint64_t number = 0;  // in the order of this rank's requests, from 1
  State state = State::kPosted;
  bool is_send = true;
  int peer = -1;  // the other rank of the set; -1: a receive from any that has no message yet
  int tag = 0;
  DType dtype = DType::kUInt8;
  std::uint64_t bytes = 0;  // of the message; of a receive that has none yet, the most it takes

  std::int64_t posted = 0;
  std::int64_t matched = 0;  // stays 0 for a short send, which waits for nobody
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

  mutable std::mutex mutex_;  // guards what follows; a request's is taken before it
  MessageTotals totals_;
};

/// The wish of a rank to send or to receive one message.
struct MessageSpec {
  bool is_send = true;
  std::optional<int> peer;  // the other rank of the set; a receive may take anybody's
  int tag = 0;
  DType dtype = DType::kUInt8;  // only compared with the peer's
  std::span<std::byte> memory;  // sent, or received into: nobody touches it until the end
  /// When the request fails, if it has not ended; max(): never.
  Clock::time_point deadline = Clock::time_point::max();
  /// Keeps the memory alive until the end.
  std::shared_ptr<void> owner = nullptr;
  /// Called when a receive's bytes are there, before anybody knows. It may throw.
  std::function<void()> received = {};
};

/// Thread: any. Blocking: wait() and wait_until() only. Errors: the request's, from these two.
class MessageRequest {
 public:
  /// Called by a thread that waits, at least every 50 ms; what it throws ends the wait.
  using Interrupt = std::function<void()>;

  explicit MessageRequest(MessageSpec spec) : spec_(std::move(spec)) {}

  bool done() const;

  /// Returns when the request has ended: a send, when its memory may be written to again, which
  /// does not say that the message has been received. The request's own deadline bounds the wait.
  void wait(const Interrupt& interrupt = {});
  /// Returns whether it has ended by `deadline`. It goes on if not.
  bool wait_until(Clock::time_point deadline, const Interrupt& interrupt = {});

  /// Calls `callback` when the request has ended: at once if it has, and otherwise on the thread of
  /// the messages, which waits for it. So it must not block, post and wait, or throw.
  void on_complete(std::function<void()> callback);

  /// Why it has failed, an Error; null if it has not, or not ended.
  std::exception_ptr error() const;

  /// The rank of the set that has sent the message, and its bytes. Precondition: a receive that has
  /// ended without an error.
  int source() const;
  std::size_t bytes() const;

  /// "receive of float32, 16 bytes, tag 3"
  std::string describe() const;

  /// Its state.
  MessageRecord record() const;

  /// Gives it its number, from 1, and tells `counters` how it ends. Precondition: nobody else knows
  /// the request yet.
  void count_with(std::shared_ptr<MessageCounters> counters, std::uint64_t number);

  const MessageSpec& spec() const noexcept { return spec_; }

 private:
  friend class MessageProtocol;
  friend class PointToPoint;

  /// It knows its message of a rank of the set, or its receive there.
  void matched(int peer, std::size_t bytes);

  /// Ends it, once: later calls do nothing. Thread: one at a time.
  void finish(std::optional<Error> error = std::nullopt);
  void finish(int source, std::size_t bytes);

  MessageSpec spec_;  // the owner is let go of at the end

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable ended_;
  bool done_ = false;
  std::optional<Error> error_;
  int source_ = -1;
  std::size_t bytes_ = 0;
  std::vector<std::function<void()>> callbacks_;
  std::shared_ptr<MessageCounters> counters_;  // null: nobody asks
  std::uint64_t number_ = 0;                   // in the order of requests, from 1
  Clock::time_point posted_{};
  Clock::time_point matched_{};
  Clock::time_point finished_{};
};

/// A rank's last messages. The flight recorder of a PointToPoint. It keeps the requests
/// themselves, which have let go of their tensors when they have ended.
///
/// Thread: any. Blocking: no. Errors: none but bad_alloc.
class MessageRecorder {
 public:
  static constexpr std::size_t kMessages = 2000;

  /// Precondition: nobody else knows the request yet.
  void posted(const std::shared_ptr<MessageRequest>& request);

  /// The last messages, oldest first; those that have not ended, too.
  std::vector<MessageRecord> records() const;

  /// Of all messages that have ended.
  MessageTotals totals() const { return counters_->totals(); }

 private:
  const std::shared_ptr<MessageCounters> counters_ = std::make_shared<MessageCounters>();
  mutable std::mutex mutex_;  // guards what follows
  std::deque<std::shared_ptr<MessageRequest>> last_;
  std::uint64_t posted_ = 0;
};

}  // namespace torch_ring
