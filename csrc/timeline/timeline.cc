// SPDX-License-Identifier: Apache-2.0
#include "timeline/timeline.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/at.h"
#include "timeline/receiver.h"

namespace torch_ring {

namespace {

// A message has room beyond this for the events of a few records, whose names are short
// (ChromeTrace::kLongestName).
constexpr std::size_t kFull = timeline::kMostBytes / 2;
constexpr std::size_t kAtOnce = 8;  // records that are taken from a stream
// How long a rank that rank 0 has told to end tries to send its last events.
constexpr std::chrono::seconds kPatience{5};
// How long it waits for its own stop() before that, which soon follows if all ranks call it: an
// operation that has ended on rank 0 may still run here.
constexpr std::chrono::seconds kOwnStop{1};
// The interval of checks for the end, which takes some milliseconds.
constexpr std::chrono::milliseconds kEndInterval{5};

}  // namespace

Timeline::Timeline(Options options, std::unique_ptr<PointToPoint> messages)
    : options_(std::move(options)), messages_(std::move(messages)), trace_(options_.rank) {
  if (options_.rank == 0) {
    auto receiver = std::make_unique<TimelineReceiver>(options_, messages_.get());
    thread_ = std::thread([this, receiver = std::move(receiver)] { run(*receiver); });
  } else {
    auto sender = std::make_unique<TimelineSender>(options_, *messages_);
    thread_ = std::thread([this, sender = std::move(sender)] { run(*sender); });
  }
}

void Timeline::watch(std::shared_ptr<RecordStream> stream) {
  const std::scoped_lock lock(mutex_);
  streams_.push_back(std::move(stream));
}

void Timeline::stop(std::chrono::milliseconds patience) {
  if (!thread_.joinable()) return;
  begin_end(patience);
  thread_.join();
}

void Timeline::begin_end(std::chrono::milliseconds patience) {
  {
    const std::scoped_lock lock(mutex_);
    deadline_ = std::min(stopping_ ? deadline_ : Clock::time_point::max(), Clock::now() + patience);
    stopping_ = true;
  }
  changed_.notify_all();
}

template <class Role>
void Timeline::run(Role& role) {
  try {
    write_until_stopped(role);
  } catch (const std::exception& error) {
    if (options_.log) {
      options_.log("rank " + std::to_string(options_.rank) +
                   ": the timeline ends here: " + error.what());
    }
  }
}

template <class Role>
void Timeline::write_until_stopped(Role& role) {
  std::string events;
  bool is_named = false;
  bool ending = false;
  std::optional<Clock::time_point> notified;  // by rank 0
  Clock::time_point due = Clock::now();
  while (true) {
    const std::optional<Clock::time_point> deadline = end_deadline();
    if (deadline && !std::exchange(ending, true)) role.begin_end();
    bool is_idle = true;
    if (role.is_ready() && (ending || Clock::now() >= due)) {
      due = Clock::now() + options_.interval;
      trace_.set_zero(role.zero());
      if (!std::exchange(is_named, true)) {
        trace_.name_rank(events, at(options_.labels, options_.rank));
      }
      if (drain(events)) due = Clock::now();
      is_idle = events.empty();
      if (!is_idle) role.write(std::exchange(events, {}));
      if (is_idle && ending) role.finish();
    }
    if (ending && ((is_idle && role.has_ended()) || Clock::now() >= *deadline)) return;
    Clock::time_point until = due;
    if (ending) {
      until = std::min(*deadline, Clock::now() + kEndInterval);
    } else if (!role.is_ready()) {
      until = Clock::now() + options_.interval;
    }
    if (!role.wait(until)) pause(until);
    if (role.is_notified_of_end() && !notified) notified = Clock::now();
    if (notified && !ending && Clock::now() >= *notified + kOwnStop) begin_end(kPatience);
  }
}

/// Sleeps until a time, or until stop().
void Timeline::pause(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, until, [this] { return stopping_; });
}

/// The deadline of the end, if it has begun.
std::optional<Clock::time_point> Timeline::end_deadline() {
  const std::scoped_lock lock(mutex_);
  return stopping_ ? std::optional(deadline_) : std::nullopt;
}

/// Formats the records in the streams, as many as fit into a message; returns whether it is full.
bool Timeline::drain(std::string& events) {
  const auto streams = [this] {
    const std::scoped_lock lock(mutex_);
    return streams_;
  }();
  std::uint64_t dropped = 0;
  for (const auto& stream : streams) {
    dropped += stream->dropped();
    do {
      records_.clear();
      if (events.size() >= kFull) break;
      stream->take(records_, kAtOnce);
      for (const OperationRecord& record : records_) {
        if (options_.mark_cycles) trace_.mark_cycle(events, record);
        trace_.add(events, record);
      }
    } while (records_.size() == kAtOnce);
  }
  const std::uint64_t news = dropped - dropped_.exchange(dropped, std::memory_order_relaxed);
  if (news > 0) trace_.add_dropped(events, options_.clock(), news);
  return events.size() >= kFull;
}

}  // namespace torch_ring
