#include "messages/message_recorder.h"

#include <utility>

namespace torch_ring {

void MessageRecorder::posted(const std::shared_ptr<MessageRequest>& request) {
  std::shared_ptr<MessageRequest> oldest;  // destroyed without the lock
  const std::scoped_lock lock(mutex_);
  request->count_with(counters_, ++posted_);
  last_.push_back(request);
  if (last_.size() <= kMessages) return;
  oldest = std::move(last_.front());
  last_.pop_front();
}

std::vector<MessageRecord> MessageRecorder::records() const {
  std::deque<std::shared_ptr<MessageRequest>> last;
  {
    const std::scoped_lock lock(mutex_);
    last = last_;
  }
  std::vector<MessageRecord> records;
  records.reserve(last.size());
  for (const auto& request : last) records.push_back(request->record());
  return records;
}

}  // namespace torch_ring
