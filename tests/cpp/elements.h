// SPDX-License-Identifier: Apache-2.0
// Elements: a buffer of any dtype of numbers or booleans, written and read as double.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/types.h"

namespace torch_ring::test {

/// The float16 bits of a whole number below 2048, which are exact.
inline std::uint16_t float16_of(double value) {
  if (value == 0) return 0;
  const int exponent = std::ilogb(value);
  const auto fraction = static_cast<int>(std::ldexp(std::fabs(value), 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | (exponent + 15) << 10 | fraction);
}

/// The value of float16 bits: a normal number or zero.
inline double value_of_float16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double magnitude = exponent == 0 ? 0 : std::ldexp(1024 + (bits & 1023), exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <class T>
T get(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

using Bytes = std::vector<std::byte>;

/// a == b by memcmp(): std::vector compares byte by byte, too slow under a sanitizer.
inline bool same(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

/// Whether all of these bytes are `value`.
inline bool is_filled(const void* data, std::size_t bytes, int value) {
  const auto* const first = static_cast<const unsigned char*>(data);
  return bytes == 0 || (*first == value && std::memcmp(first, first + 1, bytes - 1) == 0);
}

/// A buffer of `count` elements.
class Elements {
 public:
  /// Element i is value(i % period). One period is computed, then copied: loops are slow under
  /// sanitizers.
  template <class Value>
  static Elements repeating(DType dtype, std::size_t count, std::size_t period, Value&& value) {
    Elements elements(dtype, count);
    for (std::size_t i = 0; i < std::min(period, count); ++i) elements.set(i, value(i));
    auto& bytes = elements.bytes_;
    std::size_t done = std::min(period * size_of(dtype), bytes.size());
    while (done < bytes.size()) {
      const std::size_t more = std::min(done, bytes.size() - done);
      std::memcpy(bytes.data() + done, bytes.data(), more);
      done += more;
    }
    return elements;
  }

  Elements(DType dtype, std::size_t count) : dtype_(dtype), bytes_(count * size_of(dtype)) {}

  std::byte* data() { return bytes_.data(); }
  std::size_t count() const { return bytes_.size() / size_of(dtype_); }
  const Bytes& bytes() const { return bytes_; }

  void set(std::size_t index, double value) {
    std::byte* to = bytes_.data() + index * size_of(dtype_);
    switch (dtype_) {
      case DType::kUInt8:
        return put(to, static_cast<std::uint8_t>(value));
      case DType::kInt8:
        return put(to, static_cast<std::int8_t>(value));
      case DType::kInt16:
        return put(to, static_cast<std::int16_t>(value));
      case DType::kInt32:
        return put(to, static_cast<std::int32_t>(value));
      case DType::kInt64:
        return put(to, static_cast<std::int64_t>(value));
      case DType::kFloat16:
        return put(to, float16_of(value));
      case DType::kBFloat16: {
        const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
        const std::uint32_t half = 0x7fff + (bits >> 16 & 1);  // of the last bit, ties to even
        return put(to, static_cast<std::uint16_t>((bits + half) >> 16));
      }
      case DType::kFloat32:
        return put(to, static_cast<float>(value));
      case DType::kFloat64:
        return put(to, value);
      case DType::kBool:
        return put(to, static_cast<std::uint8_t>(value != 0));
      default:  // not a number
        break;
    }
  }

  double at(std::size_t index) const {
    const std::byte* from = bytes_.data() + index * size_of(dtype_);
    switch (dtype_) {
      case DType::kUInt8:
        return get<std::uint8_t>(from);
      case DType::kInt8:
        return get<std::int8_t>(from);
      case DType::kInt16:
        return get<std::int16_t>(from);
      case DType::kInt32:
        return get<std::int32_t>(from);
      case DType::kInt64:
        return static_cast<double>(get<std::int64_t>(from));
      case DType::kFloat16:
        return value_of_float16(get<std::uint16_t>(from));
      case DType::kBFloat16:
        return std::bit_cast<float>(std::uint32_t{get<std::uint16_t>(from)} << 16);
      case DType::kFloat32:
        return get<float>(from);
      case DType::kFloat64:
        return get<double>(from);
      case DType::kBool:
        return get<std::uint8_t>(from);
      default:
        return 0;
    }
    return 0;
  }

 private:
  DType dtype_;
  Bytes bytes_;
};

}  // namespace torch_ring::test
