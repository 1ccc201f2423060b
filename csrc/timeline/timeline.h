// Timeline: what this rank's operations become on their way into the one file of all ranks.
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

/// The number under which the control plane knows the connections of the n-th timeline of a world
/// is kTimelineSet + n: no process set has it.
inline constexpr std::uint64_t kTimelineSet = std::uint64_t{1} << 61;

/// Takes the records of engines' operations, and has a thread that writes them (rank 0) or sends
/// them to rank 0, a few times a second. The engines never wait: what finds no room in their
/// streams is dropped, and the file says how many were.
///
/// Rank 0 takes what other ranks send, and answers their questions for its clock: a rank of another
/// host asks a few times, and believes the answer that came soonest (F. Cristian, "Probabilistic
/// clock synchronization", 1989). Ranks of rank 0's host have its clock. A rank whose rank 0 has no
/// timeline leaves the records in the streams.
///
/// Thread: any, stop() one at a time. Blocking: stop(). Errors: the constructor's, Error(
/// kInvalidArgument) if rank 0 cannot make the file; later ones are logged once, and end it.
class Timeline {
 public:
  using Options = TimelineOptions;

  /// `messages`: of all ranks, for this timeline alone; null in a world of one.
  Timeline(Options options, std::unique_ptr<PointToPoint> messages);
  ~Timeline() { stop(std::chrono::milliseconds(0)); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  /// Takes the records of one more engine, which fills the stream: nobody else empties it.
  void watch(std::shared_ptr<RecordStream> stream);

  /// Records that found no room, of those of which the file tells.
  std::uint64_t dropped() const noexcept { return dropped_; }

  /// Writes what is there, or sends it to rank 0, and ends the thread; waits for `patience` at most
  /// until rank 0 has it all, or until the other ranks have sent it. Rank 0 ends theirs, too.
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

  // The thread's.
  ChromeTrace trace_;
  std::vector<OperationRecord> records_;   // that drain() has taken
  std::atomic<std::uint64_t> dropped_{0};  // written by the thread, read by any

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<std::shared_ptr<RecordStream>> streams_;
  bool stopping_ = false;
  Clock::time_point deadline_;  // of the end, once stopping_

  std::thread thread_;
};

}  // namespace torch_ring
