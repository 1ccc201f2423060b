// SPDX-License-Identifier: Apache-2.0
// Range and chunk_of(): the division of a buffer among ranks.
#pragma once

#include <algorithm>
#include <cstddef>

namespace torch_ring {

/// A run of elements.
struct Range {
  std::size_t begin = 0;
  std::size_t count = 0;
};

/// Chunk `index` of `parts`. The chunks cover `count` elements in order and are equal, except that
/// the last ones may be short or empty. Every boundary is a multiple of 64 elements, so no two
/// ranks write to one cache line of an aligned buffer.
constexpr Range chunk_of(std::size_t count, int parts, int index) {
  constexpr std::size_t kMultiple = 64;
  const std::size_t share =
      (count + static_cast<std::size_t>(parts) - 1) / static_cast<std::size_t>(parts);
  const std::size_t chunk = (share + kMultiple - 1) / kMultiple * kMultiple;
  const std::size_t begin = std::min(count, chunk * static_cast<std::size_t>(index));
  return {begin, std::min(chunk, count - begin)};
}

/// The elements that two ranges share; its count is 0 if there are none.
constexpr Range overlap(Range a, Range b) {
  const std::size_t begin = std::max(a.begin, b.begin);
  const std::size_t end = std::min(a.begin + a.count, b.begin + b.count);
  return {begin, end > begin ? end - begin : 0};
}

}  // namespace torch_ring
