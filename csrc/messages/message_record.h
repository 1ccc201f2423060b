// MessageRecord: one message of a rank, with its times; MessageCounters: sums over all that ended.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "core/types.h"

namespace torch_ring {

/// Times are nanoseconds of Clock; 0: not yet.
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

}  // namespace torch_ring
