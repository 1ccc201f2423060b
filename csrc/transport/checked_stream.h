// SPDX-License-Identifier: Apache-2.0
// CheckedWriter and CheckedReader: a byte stream in frames with checksums.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace torch_ring {

/// The header of a frame, in the machine's byte order, as everywhere in torch_ring:
///
///   u32 bytes | u32 CRC-32C of the bytes | u32 CRC-32C of the first two | bytes
///
/// A frame has at most kMostBytes. Received data is reduced frame by frame, and the last frame is
/// checked before its last byte is handed out, so a wrong result is never complete.
struct CheckedFrame {
  static constexpr std::size_t kMostBytes = 256u << 10;
  static constexpr std::size_t kHeaderBytes = 12;

  std::array<std::byte, kHeaderBytes> header{};
  std::size_t header_done = 0;  // bytes of the header that are sent or received
  std::size_t left = 0;         // of the frame's bytes; 0: the next frame is due
};

/// Thread: one at a time. Blocking: no.
class CheckedWriter {
 public:
  /// Calls move(bytes), which sends some and returns their number; returns how many of `bytes` are
  /// sent. The caller's next call passes the rest unchanged, because a frame of it may have begun.
  template <class Move>
  std::size_t send(std::span<const std::byte> bytes, Move&& move) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      if (frame_.left == 0) begin(bytes.subspan(done));
      const auto header = std::span(frame_.header).subspan(frame_.header_done);
      frame_.header_done += header.empty() ? 0 : move(std::span<const std::byte>(header));
      if (frame_.header_done < frame_.header.size()) break;
      const auto part = bytes.subspan(done, std::min(frame_.left, bytes.size() - done));
      const std::size_t moved = move(part);
      done += moved;
      frame_.left -= moved;
      if (moved < part.size()) break;
    }
    return done;
  }

 private:
  void begin(std::span<const std::byte> bytes);

  CheckedFrame frame_;
};

/// Thread: one at a time. Blocking: no.
class CheckedReader {
 public:
  /// Calls move(room), which receives some bytes and returns their number; returns how many of
  /// `bytes` have arrived, or nullopt if some are damaged: then the stream is lost.
  template <class Move>
  std::optional<std::size_t> receive(std::span<std::byte> bytes, Move&& move) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      if (frame_.left == 0) {
        frame_.header_done += move(std::span(frame_.header).subspan(frame_.header_done));
        if (frame_.header_done < frame_.header.size()) break;
        if (!begin()) return std::nullopt;
      }
      const auto part = bytes.subspan(done, std::min(frame_.left, bytes.size() - done));
      const std::size_t moved = move(part);
      done += moved;
      if (!take(part.first(moved))) return std::nullopt;
      if (moved < part.size()) break;
    }
    return done;
  }

 private:
  bool begin();
  bool take(std::span<const std::byte> bytes);

  CheckedFrame frame_;
  std::uint32_t expected_ = 0;
  std::uint32_t crc_ = 0;  // of the bytes so far
};

}  // namespace torch_ring
