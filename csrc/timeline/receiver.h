// TimelineReceiver: rank 0's part, which writes the file.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "timeline/options.h"
#include "timeline/protocol.h"
#include "timeline/trace_file.h"

namespace torch_ring {

/// Thread: the timeline's. Blocking: the file system. Errors: of the file; those of messages end
/// only what comes from other ranks.
class TimelineReceiver {
 public:
  /// Makes the file, whose time 0 is now. `messages` may be null.
  TimelineReceiver(const TimelineOptions& options, PointToPoint* messages);

  Clock::time_point zero() const { return zero_; }
  bool is_ready() const { return true; }
  bool is_told_to_end() const { return false; }

  /// Waits for a message until `deadline` at most, and does what it asks for; returns whether there
  /// can be more.
  bool wait(Clock::time_point deadline);
  void write(const std::string& events) { file_.append(events); }

  /// Asks the other ranks to end.
  void begin_end();
  void finish() {}
  /// Whether all of them that had begun have ended. Right after the start, also those of which
  /// nothing has come yet.
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
  std::vector<Sending> others_;                 // rank -> whether it sends; this one has ended
  std::vector<PointToPoint::Request> answers_;  // on their way
};

}  // namespace torch_ring
