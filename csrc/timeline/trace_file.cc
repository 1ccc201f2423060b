#include "timeline/trace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace torch_ring {

namespace {

constexpr std::string_view kEnd = "\n]\n";

}  // namespace

TraceFile::TraceFile(const std::string& path, std::string_view first)
    : path_(path), file_(::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666)) {
  if (!file_) {
    throw Error(ErrorKind::kInvalidArgument,
                "cannot write the timeline " + path + ": " + std::strerror(errno));
  }
  write("[\n" + std::string(first));
}

void TraceFile::append(std::string_view events) { write(",\n" + std::string(events)); }

void TraceFile::write(std::string_view text) {
  const std::string all = std::string(text).append(kEnd);
  std::size_t written = 0;
  while (written < all.size()) {
    const ssize_t count = ::pwrite(file_.get(), all.data() + written, all.size() - written,
                                   static_cast<off_t>(end_ + written));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      throw Error(ErrorKind::kInternal,
                  "cannot write the timeline " + path_ + ": " + std::strerror(errno));
    }
    written += static_cast<std::size_t>(count);
  }
  end_ += text.size();
}

}  // namespace torch_ring
