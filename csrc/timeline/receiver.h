// SPDX-License-Identifier: Apache-2.0
// TimelineReceiver: rank 0's part, which writes the file.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "messages/point_to_point.h"
#include "timeline/chrome_trace.h"

namespace torch_ring {

/// The settings of a rank's timeline.
struct TimelineOptions {
  int rank = 0;
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  bool has_clock_of_rank_0 = true;
  std::string path;
  bool mark_cycles = false;
  std::function<void(const std::string&)> log;  // takes a warning; called by the thread
  // The time between two writes. Programs for Horovod read an operation 100 ms after its end.
  std::chrono::milliseconds interval{20};
  std::function<Clock::time_point()> clock = Clock::now;  // of the records
};

}  // namespace torch_ring
namespace torch_ring::timeline {

/// Upwards, to rank 0: kClock asks for its clock, kEvents carries text, kEnd ends the events.
/// Downwards: kClock answers with two times, kEnd confirms that rank 0 has everything, kStop asks
/// the rank to end.
enum class Kind : char { kClock = 'C', kEvents = 'T', kEnd = 'E', kStop = 'S' };

inline constexpr int kUp = 1;  // tags
inline constexpr int kDown = 2;
inline constexpr std::size_t kMostBytes = std::size_t{256} << 10;

/// The answer to kClock: rank 0's time now, and time 0 of the file.
struct ClockAnswer {
  std::int64_t now_ns = 0;
  std::int64_t zero_ns = 0;
};

/// The memory of one message, kept until the message has been sent or received.
using Buffer = std::shared_ptr<std::vector<std::byte>>;

inline PointToPoint::Request send(PointToPoint& messages, int to, int tag, Kind kind,
                                  std::span<const std::byte> bytes = {}) {
  const Buffer buffer = std::make_shared<std::vector<std::byte>>(bytes.size() + 1);
  buffer->front() = static_cast<std::byte>(kind);
  if (!bytes.empty()) std::memcpy(buffer->data() + 1, bytes.data(), bytes.size());
  MessageSpec spec;
  spec.peer = to;
  spec.tag = tag;
  spec.memory = *buffer;
  spec.owner = buffer;
  return messages.post(std::move(spec));
}

inline PointToPoint::Request receive(PointToPoint& messages, std::optional<int> from, int tag,
                                     const Buffer& buffer) {
  MessageSpec spec;
  spec.is_send = false;
  spec.peer = from;
  spec.tag = tag;
  spec.memory = *buffer;
  spec.owner = buffer;
  return messages.post(std::move(spec));
}

}  // namespace torch_ring::timeline
namespace torch_ring {

/// The part of every rank but 0: sends its events to rank 0.
/// Thread: the timeline's. Blocking: wait() only. Errors: of the messages, which end it.
class TimelineSender {
 public:
  TimelineSender(const TimelineOptions& options, PointToPoint& messages);

  /// Time 0 of the file on this rank's clock. Precondition: is_ready().
  Clock::time_point zero() const { return zero_; }
  /// Whether it knows rank 0's clock, and its last events are on their way.
  bool is_ready() const;
  /// Whether rank 0 wants it to end.
  bool is_notified_of_end() const { return notified_of_end_; }

  /// Waits for an answer until `deadline` at most; returns whether more can follow.
  bool wait(Clock::time_point deadline);
  void write(const std::string& events);

  void begin_end() {}
  /// Tells rank 0, once, that no more events follow. Precondition: is_ready().
  void finish();
  /// Whether rank 0 has confirmed that it has everything.
  bool has_ended() const { return has_ended_; }

 private:
  void ask_for_clock();
  void handle(std::span<const std::byte> message);

  PointToPoint& messages_;
  const std::function<Clock::time_point()> clock_;
  const timeline::Buffer buffer_;
  PointToPoint::Request receive_;
  PointToPoint::Request sent_;

  int questions_left_;
  Clock::time_point asked_;
  Clock::duration shortest_ = Clock::duration::max();
  Clock::time_point zero_;

  bool notified_of_end_ = false;
  bool has_finished_ = false;
  bool has_ended_ = false;
};

/// Thread: the timeline's. Blocking: the file system. Errors: of the file; those of messages end
/// only the events of other ranks.
class TimelineReceiver {
 public:
  /// Creates the file, whose time 0 is now. `messages` may be null.
  TimelineReceiver(const TimelineOptions& options, PointToPoint* messages);

  Clock::time_point zero() const { return zero_; }
  bool is_ready() const { return true; }
  bool is_notified_of_end() const { return false; }

  /// Waits for a message until `deadline` at most, and handles it; returns whether more can follow.
  bool wait(Clock::time_point deadline);
  void write(const std::string& events) { file_.append(events); }

  /// Asks the other ranks to end.
  void begin_end();
  void finish() {}
  /// Whether all other ranks that have begun have ended. Right after the start, ranks that have
  /// sent nothing yet must end, too.
  bool has_ended() const;

 private:
  void handle(int source, std::span<const std::byte> message);
  void answer(int rank, timeline::Kind kind, std::span<const std::byte> bytes = {});
  void lose_others();

  PointToPoint* messages_;
  const std::function<Clock::time_point()> clock_;
  const Clock::time_point zero_;
  TraceFile file_;
  timeline::Buffer buffer_;
  PointToPoint::Request receive_;
  enum class Sending : char { kUnheard, kBegun, kEnded };
  bool is_ending_ = false;
  std::vector<Sending> others_;                 // by rank; this one has ended
  std::vector<PointToPoint::Request> answers_;  // on their way
};

}  // namespace torch_ring
