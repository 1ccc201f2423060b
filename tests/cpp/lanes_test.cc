// SPDX-License-Identifier: Apache-2.0
// Lanes: compares the conversions of every instruction set with half.h, bit by bit, including sets
// that reduce.cc does not choose on this machine.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/half.h"
#include "harness.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(TORCH_RING_SANITIZED)
#include <immintrin.h>
// The intrinsics leave vectors undefined on purpose (GCC's bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

// Only pointers go in and out, because each copy is compiled for its own instruction set.
#define CONVERT(T)                           \
  void convert(const T* from, float* to) {   \
    const auto lanes = Lanes::load(from);    \
    std::memcpy(to, &lanes, sizeof lanes);   \
  }                                          \
  void convert(const float* from, T* to) {   \
    Lanes::Vector lanes;                     \
    std::memcpy(&lanes, from, sizeof lanes); \
    Lanes::store(to, lanes);                 \
  }

// The same for pairs: elements of even and of odd index.
#define CONVERT_PAIRS                                     \
  void convert_pair(const BFloat16* from, float* to) {    \
    const Lanes::Pair pair = Lanes::load_pair(from);      \
    float places[2][Lanes::kCount];                       \
    std::memcpy(places, &pair, sizeof pair);              \
    for (std::size_t i = 0; i < 2 * Lanes::kCount; ++i) { \
      to[i] = places[i % 2][i / 2];                       \
    }                                                     \
  }                                                       \
  void convert_pair(const float* from, BFloat16* to) {    \
    float places[2][Lanes::kCount];                       \
    for (std::size_t i = 0; i < 2 * Lanes::kCount; ++i) { \
      places[i % 2][i / 2] = from[i];                     \
    }                                                     \
    Lanes::Pair pair;                                     \
    std::memcpy(&pair, places, sizeof pair);              \
    Lanes::store_pair(to, pair);                          \
  }

namespace torch_ring::test::lanes_test {
namespace {

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "core/lanes_avx2.inc"
CONVERT(Float16)
CONVERT(BFloat16)
CONVERT_PAIRS
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#include "core/lanes_avx512.inc"
CONVERT(Float16)
CONVERT(BFloat16)
CONVERT_PAIRS
}  // namespace avx512
#pragma GCC pop_options

template <class T>
T narrowed(float value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return to_float16(value);
  } else {
    return to_bfloat16(value);
  }
}

/// Checks that every 16-bit number becomes the same float32 as with half.h. A NaN stays a NaN:
/// hardware makes a signalling NaN quiet, like the following addition.
template <class T, class Convert>
void check_loads(std::size_t lanes, Convert&& convert) {
  std::vector<T> numbers(1u << 16);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = {static_cast<std::uint16_t>(i)};
  std::vector<float> converted(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); i += lanes) convert(&numbers[i], &converted[i]);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const float expected = to_float(numbers[i]);
    if (std::isnan(expected)) {
      CHECK(std::isnan(converted[i]));
    } else {
      CHECK_EQ(std::bit_cast<std::uint32_t>(converted[i]), std::bit_cast<std::uint32_t>(expected));
    }
  }
}

/// Checks that floats become the same 16 bits as with half.h: floats of all magnitudes and both
/// signs, infinities, NaNs, and those halfway between two 16-bit numbers.
template <class T, class Convert>
void check_stores(std::size_t lanes, Convert&& convert) {
  std::vector<float> floats;
  constexpr std::uint32_t kStep = 4099;  // a prime: all low bits meet all high ones
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += kStep) {
    floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  for (std::uint32_t i = 0; i < (1u << 16); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(to_float(T{static_cast<std::uint16_t>(i)}));
    for (const std::uint32_t low : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
      floats.push_back(std::bit_cast<float>(bits + low));
    }
  }
  floats.resize((floats.size() + lanes - 1) / lanes * lanes);
  // A single NaN in each lane of a vector in turn.
  for (const std::uint32_t nan : {0x7f800001u, 0x7fc12345u, 0x7fffffffu, 0xffffffffu}) {
    for (std::size_t place = 0; place < lanes; ++place) {
      floats.resize(floats.size() + lanes, 1.0f);
      floats[floats.size() - lanes + place] = std::bit_cast<float>(nan);
    }
  }
  std::vector<T> converted(floats.size());
  for (std::size_t i = 0; i < floats.size(); i += lanes) convert(&floats[i], &converted[i]);
  for (std::size_t i = 0; i < floats.size(); ++i) {
    CHECK_EQ(converted[i].bits, narrowed<T>(floats[i]).bits);
  }
}

template <class T, class Convert>
void check_lanes(std::size_t lanes, Convert&& convert) {
  check_loads<T>(lanes, convert);
  check_stores<T>(lanes, convert);
}

TEST(avx2_lanes_convert_like_half_h) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return;
  const auto convert = [](const auto* from, auto* to) { avx2::convert(from, to); };
  check_lanes<Float16>(8, convert);
  check_lanes<BFloat16>(8, convert);
  check_lanes<BFloat16>(16, [](const auto* from, auto* to) { avx2::convert_pair(from, to); });
}

TEST(avx512_lanes_convert_like_half_h) {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq")) {
    return;
  }
  const auto convert = [](const auto* from, auto* to) { avx512::convert(from, to); };
  check_lanes<Float16>(16, convert);
  check_lanes<BFloat16>(16, convert);
  check_lanes<BFloat16>(32, [](const auto* from, auto* to) { avx512::convert_pair(from, to); });
}

}  // namespace
}  // namespace torch_ring::test::lanes_test
#endif
