// SPDX-License-Identifier: Apache-2.0
#include "transport/checked_stream.h"

#include <cstring>

#include "core/crc32c.h"

namespace torch_ring {

namespace {

constexpr std::size_t kCheckedHeaderBytes = 2 * sizeof(std::uint32_t);

std::array<std::uint32_t, 3> words_of(const CheckedFrame& frame) {
  std::array<std::uint32_t, 3> words;
  static_assert(sizeof words == CheckedFrame::kHeaderBytes);
  std::memcpy(words.data(), frame.header.data(), sizeof words);
  return words;
}

}  // namespace

/// Begins a frame of the first of `bytes`.
void CheckedWriter::begin(std::span<const std::byte> bytes) {
  frame_.left = std::min(bytes.size(), CheckedFrame::kMostBytes);
  frame_.header_done = 0;
  std::array<std::uint32_t, 3> words{static_cast<std::uint32_t>(frame_.left),
                                     crc32c(bytes.first(frame_.left)), 0};
  words[2] = crc32c(std::as_bytes(std::span(words)).first(kCheckedHeaderBytes));
  std::memcpy(frame_.header.data(), words.data(), sizeof words);
}

/// Reads the complete header; returns whether it is valid.
bool CheckedReader::begin() {
  const auto [bytes, crc, header_crc] = words_of(frame_);
  const auto checked = std::span<const std::byte>(frame_.header).first(kCheckedHeaderBytes);
  if (crc32c(checked) != header_crc || bytes == 0 || bytes > CheckedFrame::kMostBytes) return false;
  frame_.header_done = 0;
  frame_.left = bytes;
  expected_ = crc;
  crc_ = 0;
  return true;
}

/// Adds the frame's next bytes to the CRC; returns false if the complete frame is damaged.
bool CheckedReader::take(std::span<const std::byte> bytes) {
  crc_ = crc32c(bytes, crc_);
  frame_.left -= bytes.size();
  return frame_.left > 0 || crc_ == expected_;
}

}  // namespace torch_ring
