// TraceFile: a file of trace events that is valid JSON after each write.
#pragma once

#include <string>
#include <string_view>

#include "core/fd.h"

namespace torch_ring {

/// An array with an event on each line. Each write replaces the array's end by more events and a
/// new end, with one system call: whoever reads the file meanwhile, or after the process was
/// killed, finds a whole array, unless the file system itself has torn the write.
///
/// Thread: one. Blocking: the file system. Errors: Error(kInvalidArgument), which names the file,
/// if it cannot be made; Error(kInternal) if it cannot be written.
class TraceFile {
 public:
  /// Makes the file, or empties it. `first`: the first event.
  TraceFile(const std::string& path, std::string_view first);

  /// `events`: at least one, with commas between them.
  void append(std::string_view events);

 private:
  void write(std::string_view text);

  const std::string path_;
  Fd file_;
  std::size_t end_ = 0;  // where the array's end begins
};

}  // namespace torch_ring
