// MessageRecorder: a rank's last messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "messages/message_record.h"
#include "messages/message_request.h"

namespace torch_ring {

/// The flight recorder of a PointToPoint. It keeps the requests themselves, which have let go of
/// their tensors when they have ended.
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
