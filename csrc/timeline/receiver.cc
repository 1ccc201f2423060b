// SPDX-License-Identifier: Apache-2.0
#include "timeline/receiver.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/at.h"
#include "core/error.h"

namespace torch_ring {

using timeline::Kind;

namespace {

// The error of the offset is at most half of the shortest round trip. On a LAN one of eight round
// trips is usually not delayed by a queue.
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
      notified_of_end_ = true;
      return;
    case Kind::kEnd:
      has_ended_ = true;
      return;
    case Kind::kEvents:
      return;
  }
}

void TimelineSender::write(const std::string& events) {
  if (sent_) sent_->wait();  // it is done: throws its error
  sent_ =
      timeline::send(messages_, 0, timeline::kUp, Kind::kEvents, std::as_bytes(std::span(events)));
}

void TimelineSender::finish() {
  if (std::exchange(has_finished_, true)) return;
  sent_ = timeline::send(messages_, 0, timeline::kUp, Kind::kEnd);
}

namespace {

// A rank that has sent nothing for so long after the start has no timeline: ranks almost always
// start theirs together.
constexpr std::chrono::seconds kFirstWords{2};

/// The wall-clock time of time 0, in the format of Horovod's timeline.
std::string first_event() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto since_epoch = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  return R"({"name":"start","ph":"M","pid":1,"args":{"start_time_since_epoch_in_micros":)" +
         std::to_string(since_epoch) + "}}";
}

}  // namespace

TimelineReceiver::TimelineReceiver(const TimelineOptions& options, PointToPoint* messages)
    : messages_(messages),
      clock_(options.clock),
      zero_(clock_()),
      file_(options.path, first_event()),
      buffer_(std::make_shared<std::vector<std::byte>>(timeline::kMostBytes)),
      others_(options.labels.size(), Sending::kUnheard) {
  others_.front() = Sending::kEnded;
}

bool TimelineReceiver::wait(Clock::time_point deadline) {
  if (messages_ == nullptr) return false;
  try {
    if (!receive_) {
      receive_ = timeline::receive(*messages_, std::nullopt, timeline::kUp, buffer_);
    }
    if (!receive_->wait_until(deadline)) return true;
    receive_->wait();  // throws its error
  } catch (const Error&) {
    lose_others();
    return false;
  }
  const PointToPoint::Request received = std::exchange(receive_, nullptr);
  handle(received->source(), std::span(*buffer_).first(received->bytes()));
  return messages_ != nullptr;
}

/// Gives up the other ranks after one has died, or the world has ended: this rank's own operations
/// are still written.
void TimelineReceiver::lose_others() {
  messages_ = nullptr;
  std::ranges::fill(others_, Sending::kEnded);
  answers_.clear();
}

void TimelineReceiver::handle(int source, std::span<const std::byte> message) {
  if (message.empty()) return;
  const auto rest = message.subspan(1);
  switch (static_cast<Kind>(message.front())) {
    case Kind::kClock: {
      at(others_, source) = Sending::kBegun;
      const timeline::ClockAnswer times{in_ns(clock_()), in_ns(zero_)};
      answer(source, Kind::kClock, std::as_bytes(std::span(&times, 1)));
      if (is_ending_ && messages_ != nullptr) answer(source, Kind::kStop);
      return;
    }
    case Kind::kEvents:
      if (!rest.empty()) file_.append({reinterpret_cast<const char*>(rest.data()), rest.size()});
      return;
    case Kind::kEnd:
      at(others_, source) = Sending::kEnded;
      return answer(source, Kind::kEnd);
    case Kind::kStop:
      return;
  }
}

void TimelineReceiver::answer(int rank, Kind kind, std::span<const std::byte> bytes) {
  std::erase_if(answers_, [](const auto& request) { return request->done(); });
  try {
    answers_.push_back(timeline::send(*messages_, rank, timeline::kDown, kind, bytes));
  } catch (const Error&) {
    lose_others();
  }
}

void TimelineReceiver::begin_end() {
  is_ending_ = true;
  for (int rank = 0; rank < static_cast<int>(others_.size()) && messages_ != nullptr; ++rank) {
    if (at(others_, rank) == Sending::kBegun) answer(rank, Kind::kStop);
  }
}

bool TimelineReceiver::has_ended() const {
  if (messages_ == nullptr) return true;
  const bool waits_for_first_words = clock_() < zero_ + kFirstWords;
  return std::ranges::none_of(others_,
                              [&](Sending sending) {
                                return sending == Sending::kBegun ||
                                       (sending == Sending::kUnheard && waits_for_first_words);
                              }) &&
         std::ranges::all_of(answers_, [](const auto& request) { return request->done(); });
}

}  // namespace torch_ring
