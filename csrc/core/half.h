// SPDX-License-Identifier: Apache-2.0
// Float16 and BFloat16: 16-bit floating-point numbers as bits, and their conversions.
//
// The conversions have no branches, so that compilers vectorise loops over them. (GCC needs
// -fno-trapping-math, or it takes each addition for a possible trap.) Conversions to float32 make
// no subnormal float32 numbers, which are slow or flushed to zero.
#pragma once

#include <bit>
#include <cstdint>

namespace torch_ring {

/// IEEE 754 binary16.
struct Float16 {
  std::uint16_t bits;
};

/// The upper half of an IEEE 754 binary32.
struct BFloat16 {
  std::uint16_t bits;
};

constexpr float to_float(BFloat16 value) {
  return std::bit_cast<float>(std::uint32_t{value.bits} << 16);
}

/// Rounds to nearest even; a NaN stays one.
constexpr BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded)};
}

constexpr float to_float(Float16 value) {
  const std::uint32_t sign = (std::uint32_t{value.bits} & 0x8000u) << 16;
  const std::uint32_t rest = std::uint32_t{value.bits} & 0x7fffu;
  // Normal: rebias the exponent from 15 to 127. Infinities and NaNs: to the largest exponent.
  const std::uint32_t rebias = rest >= 0x7c00u ? 224u << 23 : 112u << 23;
  const std::uint32_t normal = (rest << 13) + rebias;
  // Subnormal: a whole number of 2^-24.
  const float subnormal = static_cast<float>(static_cast<std::int32_t>(rest)) * 0x1p-24f;
  const std::uint32_t magnitude = rest < 0x0400u ? std::bit_cast<std::uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(sign | magnitude);
}

/// Rounds to nearest even; numbers from 65520 on become infinite; a NaN stays one.
constexpr Float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Normal: rebias the exponent by 112, round off 13 bits.
  const std::uint32_t rebiased = magnitude - (112u << 23);
  const std::uint32_t normal = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
  // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the lowest bits.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;                 // from 65520 on
  // A NaN keeps the upper bits of its payload, as in hardware.
  const std::uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  result = magnitude > 0x7f800000u ? quiet_nan : result;
  return {static_cast<std::uint16_t>(sign | result)};
}

}  // namespace torch_ring
