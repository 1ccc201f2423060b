// The messages between a timeline's ranks: the first byte says what they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "messages/point_to_point.h"

namespace torch_ring::timeline {

/// Upwards, to rank 0: kClock asks for its clock, kEvents brings text, kEnd says that no more
/// comes. Downwards: kClock answers with two times, kEnd says that rank 0 has everything, kStop
/// that it wants the end.
enum class Kind : char { kClock = 'C', kEvents = 'T', kEnd = 'E', kStop = 'S' };

inline constexpr int kUp = 1;  // tags
inline constexpr int kDown = 2;
inline constexpr std::size_t kMostBytes = std::size_t{256} << 10;

/// The answer to kClock: rank 0's time now, and the time that is 0 in the file.
struct ClockAnswer {
  std::int64_t now_ns = 0;
  std::int64_t zero_ns = 0;
};

inline std::int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// Memory of one message that lives until the message has been sent or received.
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
