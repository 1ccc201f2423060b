// SPDX-License-Identifier: Apache-2.0
#include "timeline/chrome_trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "core/types.h"

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

namespace {

/// Begins an object, after a comma if it is not the first.
void begin_event(std::string& text) {
  if (!text.empty()) text += ",\n";
  text += '{';
}

double microseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; }

const char* transport_of(const OperationRecord& record) {
  return record.fingerprint.on_host() ? name_of(record.transport) : "nccl";
}

void add_number(std::string& text, const char* key, double value) {
  char number[64];
  std::snprintf(number, sizeof number, ",\"%s\":%.3f", key, value);  // to the nanosecond
  text += number;
}

std::string upper(std::string_view name) {
  std::string text(name);
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

/// Bytes of the UTF-8 sequence at the front of `text`; 0 if there is none that is valid.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const std::size_t length = first < 0x80   ? 1
                             : first < 0xc2 ? 0
                             : first < 0xe0 ? 2
                             : first < 0xf0 ? 3
                             : first < 0xf5 ? 4
                                            : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if (first == 0xe0 && byte(1) < 0xa0) return 0;  // overlong
  if (first == 0xed && byte(1) > 0x9f) return 0;  // a surrogate
  if (first == 0xf0 && byte(1) < 0x90) return 0;  // overlong
  if (first == 0xf4 && byte(1) > 0x8f) return 0;  // above U+10FFFF
  return length;
}

}  // namespace

std::string json_string(std::string_view text) {
  std::string json = "\"";
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    const unsigned char first = static_cast<unsigned char>(text.front());
    if (length == 0) {
      json += "\\ufffd";
    } else if (first == '"' || first == '\\') {
      json += '\\';
      json += text.front();
    } else if (first < 0x20 || first == 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", first);
      json += escape;
    } else {
      json += text.substr(0, length);
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return json += '"';
}

void ChromeTrace::name_rank(std::string& text, std::string_view label) const {
  const std::string pid = std::to_string(process_);
  begin_event(text);
  text += R"("name":"process_name","ph":"M","pid":)" + pid + R"(,"args":{"name":)" +
          json_string(label) + "}}";
  begin_event(text);
  text += R"("name":"process_sort_index","ph":"M","pid":)" + pid + R"(,"args":{"sort_index":)" +
          std::to_string(process_) + "}}";
}

void ChromeTrace::set_zero(Clock::time_point zero) { zero_ = in_ns(zero); }

void ChromeTrace::add(std::string& text, const OperationRecord& record) {
  const Fingerprint& asked = record.fingerprint;
  const std::size_t lane = lane_of(record);
  const std::string operation = name_of(asked.collective);
  const std::string name = upper(operation);
  const std::string tensor =
      operation + '.' + asked.name.substr(0, kLongestName);  // as Horovod calls it
  const std::string args = R"(,"args":{"tensor":)" + json_string(tensor) + R"(,"process_set":)" +
                           std::to_string(record.set) + R"(,"sequence":)" +
                           std::to_string(record.sequence);
  // A phase that the operation lacks, or did not reach, is empty.
  const std::int64_t agreed = record.agreed != 0 ? record.agreed : record.finished;
  const std::int64_t started = record.started != 0 ? record.started : agreed;
  begin_span(text, "NEGOTIATE_" + name, lane, record.submitted, agreed);
  text += args + "}}";
  begin_span(text, name, lane, agreed, record.finished);
  text += args + R"(,"bytes":)" + std::to_string(record.bytes) + R"(,"dtype":")" +
          name_of(asked.dtype) + R"(","transport":")" + transport_of(record) + '"';
  if (record.state == OperationRecord::State::kFailed) text += R"(,"state":"failed")";
  add_number(text, "started", microseconds(started - zero_));
  text += "}}";
  if (started > agreed) {
    begin_span(text, "QUEUE", lane, agreed, started);
    text += '}';
  }
  if (record.is_fused) {
    begin_span(text, "MEMCPY_IN_FUSION_BUFFER", lane, started, record.packed);
    text += '}';
    begin_span(text, "MEMCPY_OUT_FUSION_BUFFER", lane, record.reduced, record.finished);
    text += '}';
  }
}

void ChromeTrace::mark_cycle(std::string& text, const OperationRecord& record) {
  if (record.round == 0) return;
  std::uint64_t& marked = rounds_[record.set];
  if (record.round <= marked) return;
  marked = record.round;
  begin_event(text);
  text += R"("name":"CYCLE_START","ph":"i","s":"p","pid":)" + std::to_string(process_) +
          R"(,"tid":)" + std::to_string(kFirst) + R"(,"args":{"process_set":)" +
          std::to_string(record.set) + '}';
  add_number(text, "ts", microseconds(record.agreed - zero_));
  text += '}';
}

void ChromeTrace::add_dropped(std::string& text, Clock::time_point now, std::uint64_t count) const {
  begin_event(text);
  text += R"("name":"DROPPED","ph":"i","s":"p","pid":)" + std::to_string(process_) + R"(,"tid":)" +
          std::to_string(kFirst) + R"(,"args":{"operations":)" + std::to_string(count) + '}';
  add_number(text, "ts", microseconds(in_ns(now) - zero_));
  text += '}';
}

/// The first lane whose last operation ended before this one was submitted.
std::size_t ChromeTrace::lane_of(const OperationRecord& record) {
  const auto lane =
      std::ranges::find_if(lane_ends_, [&](std::int64_t end) { return end <= record.submitted; });
  const auto index = static_cast<std::size_t>(lane - lane_ends_.begin());
  if (lane == lane_ends_.end()) lane_ends_.push_back(0);
  lane_ends_[index] = record.finished;
  return index;
}

void ChromeTrace::begin_span(std::string& text, std::string_view name, std::size_t lane,
                             std::int64_t begin, std::int64_t end) const {
  begin_event(text);
  text += R"("name":")" + std::string(name) + R"(","ph":"X","pid":)" + std::to_string(process_) +
          R"(,"tid":)" + std::to_string(kFirst + static_cast<int>(lane));
  add_number(text, "ts", microseconds(begin - zero_));
  add_number(text, "dur", microseconds(std::max<std::int64_t>(end - begin, 0)));
}

}  // namespace torch_ring
