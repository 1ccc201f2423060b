#include "timeline/sender.h"

#include <utility>

namespace torch_ring {

using timeline::Kind;

namespace {

// The offset is wrong by half of the shortest round trip at most. On a LAN eight of them are
// enough for one that no queue has delayed.
constexpr int kQuestions = 8;
constexpr std::size_t kLongestAnswer = 1 + sizeof(timeline::ClockAnswer);

}  // namespace

TimelineSender::TimelineSender(const TimelineOptions& options, PointToPoint& messages)
    : messages_(messages),
      clock_(options.clock),
      buffer_(std::make_shared<std::vector<std::byte>>(kLongestAnswer)),
      questions_left_(options.has_clock_of_rank_0 ? 1 : kQuestions) {
  if (options.has_clock_of_rank_0) shortest_ = Clock::duration::zero();
  receive_ = timeline::receive(messages_, 0, timeline::kDown, buffer_);
  ask_for_clock();
}

bool TimelineSender::is_ready() const { return questions_left_ == 0 && (!sent_ || sent_->done()); }

void TimelineSender::ask_for_clock() {
  asked_ = clock_();
  sent_ = timeline::send(messages_, 0, timeline::kUp, Kind::kClock);
}

bool TimelineSender::wait(Clock::time_point deadline) {
  if (!receive_->wait_until(deadline)) return true;
  receive_->wait();  // throws its error
  handle(std::span(*buffer_).first(receive_->bytes()));
  receive_ = timeline::receive(messages_, 0, timeline::kDown, buffer_);
  return true;
}

void TimelineSender::handle(std::span<const std::byte> message) {
  if (message.empty()) return;
  switch (static_cast<Kind>(message.front())) {
    case Kind::kClock: {
      if (message.size() != kLongestAnswer || questions_left_ == 0) return;
      timeline::ClockAnswer answer;
      std::memcpy(&answer, message.data() + 1, sizeof answer);
      const std::chrono::nanoseconds zero(answer.zero_ns);
      const Clock::time_point now = clock_();
      if (shortest_ == Clock::duration::zero()) {  // the same clock
        zero_ = Clock::time_point(zero);
      } else if (now - asked_ < shortest_) {
        shortest_ = now - asked_;
        const std::chrono::nanoseconds since_zero(answer.now_ns - answer.zero_ns);
        zero_ = asked_ + shortest_ / 2 - since_zero;
      }
      if (--questions_left_ > 0) ask_for_clock();
      return;
    }
    case Kind::kStop:
      told_to_end_ = true;
      return;
    case Kind::kEnd:
      has_ended_ = true;
      return;
    case Kind::kEvents:
      return;
  }
}

void TimelineSender::write(const std::string& events) {
  if (sent_) sent_->wait();  // which is done: throws its error
  sent_ =
      timeline::send(messages_, 0, timeline::kUp, Kind::kEvents, std::as_bytes(std::span(events)));
}

void TimelineSender::finish() {
  if (std::exchange(has_finished_, true)) return;
  sent_ = timeline::send(messages_, 0, timeline::kUp, Kind::kEnd);
}

}  // namespace torch_ring
