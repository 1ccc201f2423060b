// SPDX-License-Identifier: Apache-2.0
#include "core/finite.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace torch_ring {

namespace {

constexpr std::size_t kAtATime = 4096;  // elements: 8 to 32 KiB, which the first-level cache holds

/// Magnitudes of one format have the order of their bits without the sign.
template <class Bits>
Worst worst_of(const void* data, std::size_t count, Bits infinity, Bits limit) {
  using Aliased [[gnu::may_alias]] = Bits;
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() >> 1;
  const auto* const bits = static_cast<const Aliased*>(data);
  limit = std::min<Bits>(limit, infinity - 1);
  const Bits rest = kMagnitude - limit;
  for (std::size_t begin = 0; begin < count; begin += kAtATime) {
    const std::size_t end = std::min(count, begin + kAtATime);
    Bits sums = 0;
    for (std::size_t i = begin; i < end; ++i) {
      sums = static_cast<Bits>(sums | static_cast<Bits>((bits[i] & kMagnitude) + rest));
    }
    if (sums <= kMagnitude) continue;
    Bits largest = 0;
    for (std::size_t i = begin; i < count; ++i) {
      largest = std::max(largest, static_cast<Bits>(bits[i] & kMagnitude));
    }
    return largest > infinity    ? Worst::kNaN
           : largest == infinity ? Worst::kInfinite
                                 : Worst::kLarge;
  }
  return Worst::kFinite;
}

/// The largest float32 that is not above a positive number.
float toward_zero(double value) {
  const auto rounded = static_cast<float>(value);
  return rounded > value ? std::nextafter(rounded, 0.0F) : rounded;
}

}  // namespace

Worst worst_of(const void* data, std::size_t count, DType dtype, double limit) {
  count *= parts_of(dtype);
  const auto bits = std::bit_cast<std::uint32_t>(toward_zero(limit));
  switch (part_of(dtype)) {
    case DType::kFloat16:
      return worst_of<std::uint16_t>(data, count, 0x7c00, 0x7bff);
    case DType::kBFloat16:
      return worst_of<std::uint16_t>(data, count, 0x7f80, static_cast<std::uint16_t>(bits >> 16));
    case DType::kFloat32:
      return worst_of<std::uint32_t>(data, count, 0x7f80'0000, bits);
    case DType::kFloat64:
      return worst_of<std::uint64_t>(data, count, 0x7ff0'0000'0000'0000,
                                     std::bit_cast<std::uint64_t>(limit));
    default:
      return Worst::kFinite;
  }
}

}  // namespace torch_ring
