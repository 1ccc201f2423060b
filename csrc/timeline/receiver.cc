#include "timeline/receiver.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/at.h"
#include "core/error.h"

namespace torch_ring {

using timeline::Kind;

namespace {

// A rank of which nothing has come for so long since the start has no timeline. Ranks begin theirs
// together, as good as always.
constexpr std::chrono::seconds kFirstWords{2};

/// Says when time 0 was, in the words of Horovod's timeline.
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

/// A rank has died, or the world ends: this rank's own operations are still written.
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
      const timeline::ClockAnswer times{timeline::nanoseconds(clock_()),
                                        timeline::nanoseconds(zero_)};
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
