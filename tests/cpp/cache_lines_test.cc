// SPDX-License-Identifier: Apache-2.0
#include "memory/cache_lines.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "harness.h"

namespace torch_ring::test::cache_lines_test {

TEST(copy_nontemporal_writes_exactly_its_target_range) {
  constexpr std::size_t kMost = 5 * kCacheLine;
  constexpr auto kUntouched = std::byte{0xee};
  std::vector<std::byte> source(kMost + kCacheLine);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i % 199);
  for (std::size_t offset = 0; offset <= kCacheLine; ++offset) {
    for (std::size_t bytes = 0; bytes <= kMost; bytes += bytes < 70 ? 1 : 13) {
      std::vector<std::byte> target(kMost + 2 * kCacheLine, kUntouched);
      const std::byte* const from = source.data() + (offset * 7) % kCacheLine;
      copy_nontemporal(target.data() + offset, from, bytes);
      const auto begin = target.begin() + static_cast<std::ptrdiff_t>(offset);
      const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
      const auto is_untouched = [&](std::byte byte) { return byte == kUntouched; };
      CHECK(std::equal(begin, end, from));
      CHECK(std::all_of(target.begin(), begin, is_untouched));
      CHECK(std::all_of(end, target.end(), is_untouched));
    }
  }
}

}  // namespace torch_ring::test::cache_lines_test
