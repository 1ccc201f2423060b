// SPDX-License-Identifier: Apache-2.0
// Timeline: writes this rank's operations to the one file of all ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/recorder.h"
#include "messages/point_to_point.h"
#include "timeline/chrome_trace.h"
#include "timeline/receiver.h"

namespace torch_ring {

/// In the control plane the connections of the n-th timeline of a world have the set number
/// kTimelineSet + n, which no process set has.
inline constexpr std::uint64_t kTimelineSet = std::uint64_t{1} << 61;

/// A thread takes the records of the engines' operations, and writes them (on rank 0) or sends them
/// to rank 0. The engines never wait: records without room in their streams are dropped, and the
/// file has their number.
///
/// Rank 0 receives the events of the other ranks, and answers their questions for its clock: a rank
/// of another host asks a few times, and uses the answer with the shortest round trip (F. Cristian,
/// "Probabilistic clock synchronization", 1989). Ranks of rank 0's host have its clock. A rank
/// whose rank 0 has no timeline leaves the records in the streams.
///
/// Thread: any, stop() one at a time. Blocking: stop(). Errors: the constructor's, Error(
/// kInvalidArgument) if rank 0 cannot make the file; later ones are logged once, and end the
/// timeline.
class Timeline {
 public:
  using Options = TimelineOptions;

  /// `messages`: among all ranks, for this timeline alone; null in a world of one.
  Timeline(Options options, std::unique_ptr<PointToPoint> messages);
  ~Timeline() { stop(std::chrono::milliseconds(0)); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  /// Adds the stream of one more engine, which no other reader may empty.
  void watch(std::shared_ptr<RecordStream> stream);

  /// The number of dropped records that the file reports.
  std::uint64_t dropped() const noexcept { return dropped_; }

  /// Writes the last records, or sends them to rank 0, and ends the thread; waits for `patience` at
  /// most until rank 0 has them all, or, on rank 0, until the other ranks have sent theirs. Rank 0
  /// ends their timelines, too.
  void stop(std::chrono::milliseconds patience);

 private:
  void begin_end(std::chrono::milliseconds patience);

  template <class Role>
  void run(Role& role);
  template <class Role>
  void write_until_stopped(Role& role);
  bool drain(std::string& events);
  void pause(Clock::time_point until);
  std::optional<Clock::time_point> end_deadline();

  const Options options_;
  const std::unique_ptr<PointToPoint> messages_;

  // Used by the thread only, except dropped_.
  ChromeTrace trace_;
  std::vector<OperationRecord> records_;   // taken by drain()
  std::atomic<std::uint64_t> dropped_{0};  // written by the thread, read by any

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<std::shared_ptr<RecordStream>> streams_;
  bool stopping_ = false;
  Clock::time_point deadline_;  // of the end, once stopping_

  std::thread thread_;
};

}  // namespace torch_ring
