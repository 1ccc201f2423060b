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
  void ended(const MessageRecord& record) {
    const std::scoped_lock lock(mutex_);
    MessageTotals::Sums& sums = record.is_send ? totals_.sent : totals_.received;
    ++sums.messages;
    if (record.state == MessageRecord::State::kFailed) {
      ++sums.failed;
    } else {
      sums.bytes += record.bytes;
    }
  }

  MessageTotals totals() const {
    const std::scoped_lock lock(mutex_);
    return totals_;
  }

 private:
  mutable std::mutex mutex_;
  MessageTotals totals_;
};

}  // namespace torch_ring
