// TimelineSender: the part of every rank but 0, which sends its events there.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "timeline/options.h"
#include "timeline/protocol.h"

namespace torch_ring {

/// Thread: the timeline's. Blocking: wait() only. Errors: of the messages, which end it.
class TimelineSender {
 public:
  TimelineSender(const TimelineOptions& options, PointToPoint& messages);

  /// The time on this rank's clock that is 0 in the file. Precondition: is_ready().
  Clock::time_point zero() const { return zero_; }
  /// Whether it knows rank 0's clock, and what it has sent before is on its way.
  bool is_ready() const;
  /// Whether rank 0 wants it to end.
  bool is_told_to_end() const { return told_to_end_; }

  /// Waits for an answer until `deadline` at most; returns whether there can be more.
  bool wait(Clock::time_point deadline);
  void write(const std::string& events);

  void begin_end() {}
  /// Tells rank 0, once, that no more comes. Precondition: is_ready().
  void finish();
  /// Whether rank 0 has said that it has everything.
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

  bool told_to_end_ = false;
  bool has_finished_ = false;
  bool has_ended_ = false;
};

}  // namespace torch_ring
