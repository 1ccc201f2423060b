// SPDX-License-Identifier: Apache-2.0
// ChromeTrace: the events of one rank in Chrome's trace format, which Perfetto reads.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/fd.h"
#include "engine/recorder.h"

namespace torch_ring {

/// A file of trace events, an array with one event a line, that is valid JSON after each write.
/// Each write replaces the array's end by more events and a new end, with one system call: a reader
/// finds a whole array meanwhile, and after the process was killed, unless the file system itself
/// has torn the write.
///
/// Thread: one. Blocking: the file system. Errors: Error(kInvalidArgument), which names the file,
/// if it cannot be made; Error(kInternal) if it cannot be written.
class TraceFile {
 public:
  /// Creates the file, or empties it. `first`: the first event.
  TraceFile(const std::string& path, std::string_view first);

  /// `events`: at least one, with commas between them.
  void append(std::string_view events);

 private:
  void write(std::string_view text);

  const std::string path_;
  Fd file_;
  std::size_t end_ = 0;  // the offset of the array's end
};

/// Formats operations as JSON objects, separated by commas and line breaks, so that blocks of them
/// can be joined (TraceFile). A rank is a "process" of the trace; overlapping operations lie on its
/// "threads", each on the first free one. An operation is NEGOTIATE_ALLREDUCE until all ranks have
/// requested it, then ALLREDUCE, which contains QUEUE and its activities. These names are
/// Horovod's, as is the name of the operation's tensor, "allreduce.loss".
///
/// Thread: one. Blocking: no.
class ChromeTrace {
 public:
  /// The most bytes of an operation's name; longer names are cut.
  static constexpr std::size_t kLongestName = 1024;

  /// The number of rank 0's process, and of a rank's first thread: Perfetto takes process 0 and
  /// thread 0 for the kernel's idle task (google/perfetto, issues 394 and 2278).
  static constexpr int kFirst = 1;

  explicit ChromeTrace(int rank) : process_(kFirst + rank) {}
  /// `zero`: time 0 of the trace on this rank's clock.
  void set_zero(Clock::time_point zero);

  /// Names the rank's rows: "rank 2 (10.0.0.7, pid 4711)".
  void name_rank(std::string& text, std::string_view label) const;
  /// Call it in the order in which the rank's operations ended.
  void add(std::string& text, const OperationRecord& record);
  /// Marks the round in which the operation was agreed, once per round.
  void mark_cycle(std::string& text, const OperationRecord& record);
  /// Adds an event that `count` operations are missing at `now`.
  void add_dropped(std::string& text, Clock::time_point now, std::uint64_t count) const;

 private:
  std::size_t lane_of(const OperationRecord& record);
  void begin_span(std::string& text, std::string_view name, std::size_t lane, std::int64_t begin,
                  std::int64_t end) const;

  const int process_;
  std::int64_t zero_ = 0;  // ns of Clock, as the records' times
  std::vector<std::int64_t> lane_ends_;
  std::map<std::uint64_t, std::uint64_t> rounds_;  // set -> the last one that was marked
};

/// A JSON string with its quotes. Invalid UTF-8 becomes U+FFFD.
std::string json_string(std::string_view text);

}  // namespace torch_ring
