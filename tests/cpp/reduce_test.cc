// SPDX-License-Identifier: Apache-2.0
#include "core/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/finite.h"
#include "core/half.h"
#include "elements.h"
#include "harness.h"

namespace torch_ring::test::reduce_test {
namespace {

constexpr DType kDTypes[] = {DType::kUInt8,   DType::kInt8,    DType::kInt16,    DType::kInt32,
                             DType::kInt64,   DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                             DType::kFloat64, DType::kBool};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
constexpr ReduceOp kBitwise[] = {ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor};
constexpr std::size_t kCounts[] = {0, 1, 1024, 2500};

/// `value` rounded to a floating-point format, without subnormal numbers.
double rounded(DType dtype, double value) {
  if (dtype == DType::kFloat64 || value == 0) return value;
  if (dtype == DType::kFloat32) return static_cast<float>(value);
  const int fraction_bits = dtype == DType::kFloat16 ? 10 : 7;
  const double unit = std::ldexp(1, std::ilogb(value) - fraction_bits);
  return std::nearbyint(value / unit) * unit;
}

/// The lowest bits of `value`, as an integer of the dtype.
double wrapped(DType dtype, std::int64_t value) {
  switch (dtype) {
    case DType::kUInt8:
      return static_cast<std::uint8_t>(value);
    case DType::kInt8:
      return static_cast<std::int8_t>(value);
    case DType::kInt16:
      return static_cast<std::int16_t>(value);
    case DType::kInt32:
      return static_cast<std::int32_t>(value);
    default:
      return static_cast<double>(value);
  }
}

/// One element's result by reduce.h's contract, computed in the simplest way. Partial results are
/// small whole numbers or halves of them, so they are exact in every dtype.
double expected(const Reduction& reduction, const std::vector<double>& inputs) {
  const auto& [dtype, op, scaling] = reduction;
  const DType partial_dtype = accumulation_dtype(reduction);
  const auto kept = [&](double value) {
    return is_floating_point(dtype) ? rounded(partial_dtype, value)
                                    : wrapped(dtype, static_cast<std::int64_t>(std::trunc(value)));
  };
  std::optional<double> result;
  for (const double input : inputs) {
    const double b = dtype == DType::kBool ? input : kept(input * scaling.prescale);
    if (!result) {
      result = b;
      continue;
    }
    const double a = *result;
    if (op == ReduceOp::kMin) result = std::min(a, b);
    if (op == ReduceOp::kMax) result = std::max(a, b);
    if (op == ReduceOp::kSum) result = kept(a + b);
    if (op == ReduceOp::kProduct) result = kept(a * b);
    const auto bits = [](double number) { return static_cast<std::int64_t>(number); };
    if (op == ReduceOp::kBand) result = kept(static_cast<double>(bits(a) & bits(b)));
    if (op == ReduceOp::kBor) result = kept(static_cast<double>(bits(a) | bits(b)));
    if (op == ReduceOp::kBxor) result = kept(static_cast<double>(bits(a) ^ bits(b)));
  }
  if (dtype == DType::kBool) return *result != 0;
  const auto divisor = static_cast<double>(scaling.divisor);
  if (!is_floating_point(dtype)) return kept(*result * scaling.postscale / divisor);
  const double factor = rounded(partial_dtype, scaling.postscale / divisor);
  const double scaled = scaling.postscale == 1 ? *result / divisor : *result * factor;
  return rounded(dtype, rounded(partial_dtype, scaled));
}

/// Elements repeat with this period, so expected values are computed once for each.
constexpr std::size_t kPeriod = 7;

/// Elements of rank `rank`: small numbers of both signs (if the dtype has two), zero among them.
Elements elements_of(DType dtype, std::size_t count, std::size_t rank) {
  Elements elements(dtype, count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>((i * 5 + rank * 3) % kPeriod) - 3;
    elements.set(i, dtype == DType::kUInt8 ? value + 3 : value);
  }
  return elements;
}

/// The buffers of all ranks, and their pointers for reduce().
struct Inputs {
  Inputs(DType dtype, std::size_t count, std::size_t ranks) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      buffers.push_back(elements_of(dtype, count, rank));
    }
    for (Elements& buffer : buffers) pointers.push_back(buffer.data());
  }
  std::vector<double> at(std::size_t index) const {
    std::vector<double> values;
    for (const Elements& buffer : buffers) values.push_back(buffer.at(index));
    return values;
  }

  std::vector<Elements> buffers;
  std::vector<const void*> pointers;
};

std::string named(const Reduction& reduction, std::size_t ranks, std::size_t index) {
  return std::string(name_of(reduction.dtype)) + " " + name_of(reduction.op) + " of " +
         std::to_string(ranks) + ", element " + std::to_string(index);
}

/// Checks elements [begin, end) of `output`.
void check_result(const Elements& output, const Inputs& inputs, const Reduction& reduction,
                  std::size_t begin, std::size_t end) {
  std::array<double, kPeriod> values{};
  for (std::size_t i = 0; i < std::min(kPeriod, output.count()); ++i) {
    values[i] = expected(reduction, inputs.at(i));
  }
  for (std::size_t i = begin; i < end; ++i) {
    const double value = values[i % kPeriod];
    if (output.at(i) == value) continue;
    fail(__FILE__, __LINE__,
         named(reduction, inputs.buffers.size(), i) + ": " + shown(output.at(i)) + ", not " +
             shown(value));
  }
}

void check_result(const Elements& output, const Inputs& inputs, const Reduction& reduction) {
  check_result(output, inputs, reduction, 0, output.count());
}

/// Calls `body` with every dtype and operator, scaled in every way that it allows.
void for_reductions(const std::function<void(const Reduction&)>& body) {
  const Scaling scalings[] = {{}, {1, 1, 2}, {1, 1, 3}, {0.5, 1, 1}, {0.5, 2, 3}, {1, 0.75, 1}};
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kOps) {
      for (const Scaling& scaling : scalings) body({dtype, op, scaling});
    }
    for (const ReduceOp op : kBitwise) {
      if (can_reduce(dtype, op)) body({dtype, op, {}});
    }
  }
}

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
float of_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

TEST(reduce_every_dtype_operator_scaling_and_count) {
  for_reductions([](const Reduction& reduction) {
    for (const std::size_t ranks : {1, 2, 3}) {
      for (const std::size_t count : kCounts) {
        const Inputs inputs(reduction.dtype, count, ranks);
        Elements output(reduction.dtype, count);
        const std::array<void*, 1> outputs{output.data()};
        reduce(outputs, inputs.pointers, count, reduction);
        check_result(output, inputs, reduction);
      }
    }
  });
}

TEST(reduce_in_place_into_several_outputs) {
  for_reductions([](const Reduction& reduction) {
    const std::size_t count = reduction.op == ReduceOp::kSum ? 40'001 : 2501;
    for (const std::size_t ranks : {2, 3}) {
      const Inputs original(reduction.dtype, count, ranks);
      Inputs inputs(reduction.dtype, count, ranks);
      std::vector<void*> outputs;
      for (Elements& buffer : inputs.buffers) outputs.push_back(buffer.data());
      reduce(outputs, inputs.pointers, count, reduction);
      for (const Elements& buffer : inputs.buffers) check_result(buffer, original, reduction);
    }
  });
}

TEST(reduce_partial_and_finish_partial_equal_reduce) {
  for_reductions([](const Reduction& reduction) {
    constexpr std::size_t kCount = 2500;
    const Inputs inputs(reduction.dtype, kCount, 4);
    const std::span<const void* const> pointers(inputs.pointers);
    Elements partial(accumulation_dtype(reduction), kCount);
    Elements other = partial;
    Elements output(reduction.dtype, kCount);
    const std::array<void*, 1> outputs{output.data()};
    reduce_partial(partial.data(), pointers.first(3), kCount, reduction);
    reduce_partial(other.data(), pointers.last(1), kCount, reduction);
    combine_partial(partial.data(), other.data(), kCount, reduction);
    finish_partial(outputs, partial.data(), kCount, reduction);
    check_result(output, inputs, reduction);
  });
}

TEST(finish_partial_works_in_place_for_equal_dtypes) {
  Inputs inputs(DType::kFloat32, 1500, 1);
  const Inputs original = inputs;
  const Reduction reduction{DType::kFloat32, ReduceOp::kSum, {1, 1, 3}};
  const std::array<void*, 1> outputs{inputs.buffers[0].data()};
  finish_partial(outputs, inputs.buffers[0].data(), 1500, reduction);
  check_result(inputs.buffers[0], original, reduction);
}

TEST(reduce_needs_no_alignment_beyond_the_dtype) {
  for (const DType dtype : kDTypes) {
    const std::size_t item = size_of(dtype);
    const Reduction reduction{dtype, ReduceOp::kSum, {}};
    Inputs inputs(dtype, 20'000, 2);
    const Inputs whole = inputs;
    for (std::size_t i = 0; i < 2; ++i) inputs.pointers[i] = inputs.buffers[i].data() + item;
    Elements output(dtype, 20'000);
    output.set(0, 1);
    output.set(19'999, 1);
    const std::array<void*, 1> outputs{output.data() + item};
    reduce(outputs, inputs.pointers, 19'998, reduction);
    check_result(output, whole, reduction, 1, 19'999);
    CHECK_EQ(output.at(0), 1.0);  // no write beyond the ends
    CHECK_EQ(output.at(19'999), 1.0);
  }
}

TEST(reduce_of_a_bitwise_operator_and_its_identity_changes_nothing) {
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kBitwise) {
      if (!can_reduce(dtype, op)) continue;
      const Elements values = elements_of(dtype, 1500, 1);  // more than a block
      Elements result(dtype, 1500);
      fill_identity(result.data(), 1500, dtype, op);
      const std::array<const void*, 2> inputs{result.data(), values.bytes().data()};
      const std::array<void*, 1> outputs{result.data()};
      reduce(outputs, inputs, 1500, {dtype, op, {}});
      CHECK(same(result.bytes(), values.bytes()));
    }
  }
}

TEST(reduce_propagates_nan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : kOps) {
    std::array<float, 2> a{nan, 1};
    std::array<float, 2> b{1, nan};
    const std::array<const void*, 2> inputs{a.data(), b.data()};
    const std::array<void*, 1> outputs{a.data()};
    reduce(outputs, inputs, 2, {DType::kFloat32, op, {}});
    CHECK(std::isnan(a[0]) && std::isnan(a[1]));
  }
}

TEST(reduce_integers_wrap_divide_toward_zero_and_stay_in_range) {
  using Limits = std::numeric_limits<std::int64_t>;
  const auto sum_of = [](std::int64_t a, std::int64_t b, const Scaling& scaling) {
    std::int64_t output = 0;
    const std::array<const void*, 2> inputs{&a, &b};
    const std::array<void*, 1> outputs{&output};
    reduce(outputs, inputs, 1, {DType::kInt64, ReduceOp::kSum, scaling});
    return output;
  };
  CHECK_EQ(sum_of(Limits::max(), 1, {}), Limits::min());
  CHECK_EQ(sum_of(Limits::max() - 1, 0, {1, 1, 2}), Limits::max() / 2);  // not through float64
  CHECK_EQ(sum_of(-3, 0, {1, 1, 2}), -1);
  CHECK_EQ(sum_of(1, 2, {1.9, 1, 1}), 4);  // 1 + 3: each is truncated
  CHECK_EQ(sum_of(Limits::max(), 0, {1, 4, 1}), Limits::max());
  CHECK_EQ(sum_of(Limits::min(), 0, {1, 4, 1}), Limits::min());

  // Whole factors are exact, where float64 has only every 256th integer.
  constexpr std::int64_t kLarge = (std::int64_t{1} << 60) + 1;
  CHECK_EQ(sum_of(kLarge, -kLarge - 2, {3, 1, 1}), -6);
  CHECK_EQ(sum_of(kLarge, 2, {1, -7, 1}), -7 * (kLarge + 2));
  CHECK_EQ(sum_of(kLarge, 0, {-8, 1, 1}), Limits::min());
  CHECK_EQ(sum_of(Limits::max(), 0, {1, 0x1p62, 1}), Limits::max());
}

/// The Average of `values`, by reduce() and in two steps, which must agree.
template <class T>
T average_of(DType dtype, const std::vector<T>& values, double prescale = 1.0,
             double postscale = 1.0) {
  std::vector<const void*> inputs;
  for (const T& value : values) inputs.push_back(&value);
  const Reduction reduction{
      dtype, ReduceOp::kSum, {prescale, postscale, static_cast<std::int64_t>(values.size())}};
  T at_once{};
  const std::array<void*, 1> whole{&at_once};
  reduce(whole, inputs, 1, reduction);

  alignas(16) std::array<std::byte, 16> partial;
  alignas(16) std::array<std::byte, 16> other;
  const std::span<const void* const> all(inputs);
  reduce_partial(partial.data(), all.first(1), 1, reduction);
  for (std::size_t i = 1; i < values.size(); ++i) {
    reduce_partial(other.data(), all.subspan(i, 1), 1, reduction);
    combine_partial(partial.data(), other.data(), 1, reduction);
  }
  T in_steps{};
  const std::array<void*, 1> outputs{&in_steps};
  finish_partial(outputs, partial.data(), 1, reduction);
  CHECK(at_once == in_steps);
  return at_once;
}

template <class T>
void check_averages_at_the_ends(DType dtype) {
  constexpr T kMost = std::numeric_limits<T>::max();
  constexpr T kLeast = std::numeric_limits<T>::min();
  for (const std::size_t ranks : {2, 3, 16}) {
    CHECK(average_of(dtype, std::vector<T>(ranks, kMost)) == kMost);
    CHECK(average_of(dtype, std::vector<T>(ranks, kLeast)) == kLeast);
  }
  CHECK(average_of<T>(dtype, {kMost, kMost, static_cast<T>(kMost - 1)}) == kMost - 1);
  CHECK(average_of<T>(dtype, {kMost, kLeast, 0}) == static_cast<T>((kMost + kLeast) / 3));
  CHECK(average_of<T>(dtype, {kMost, kMost}, 4.0) == kMost);       // clamped before
  CHECK(average_of<T>(dtype, {kMost, kMost}, 1.0, 4.0) == kMost);  // and after
}

TEST(reduce_averages_of_integers_do_not_wrap) {
  check_averages_at_the_ends<std::uint8_t>(DType::kUInt8);
  check_averages_at_the_ends<std::int8_t>(DType::kInt8);
  check_averages_at_the_ends<std::int16_t>(DType::kInt16);
  check_averages_at_the_ends<std::int32_t>(DType::kInt32);
  check_averages_at_the_ends<std::int64_t>(DType::kInt64);
  CHECK_EQ(int{average_of<std::int8_t>(DType::kInt8, {-100, -101})}, -100);  // toward zero
  // -2^63 + 1, and no float64 between.
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  CHECK_EQ(average_of<std::int64_t>(DType::kInt64, {least, least + 2}), least + 1);
  const std::int64_t large = (std::int64_t{1} << 60) + 1;
  CHECK_EQ(average_of<std::int64_t>(DType::kInt64, {large, large, large}, 5.0), 5 * large);
  CHECK_EQ(average_of<std::int64_t>(DType::kInt64, {-large, 1 - large}, 1.0, 3.0), 2 - 3 * large);
}

TEST(reduce_complex_numbers_as_their_parts) {
  const auto run = [](DType dtype, auto zero) {
    using T = decltype(zero);
    std::vector<std::array<T, 6>> data{
        {1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}, {1, 1, 1, 1, 1, 1}};
    std::vector<const void*> inputs;
    for (const auto& each : data) inputs.push_back(each.data());
    std::array<T, 6> output{};
    const std::array<void*, 1> outputs{output.data()};
    reduce(outputs, inputs, 3, {dtype, ReduceOp::kSum, {0.5, 2, 3}});
    for (std::size_t i = 0; i < 6; ++i) {
      const T sum = data[0][i] / 2 + data[1][i] / 2 + data[2][i] / 2;
      CHECK_EQ(static_cast<double>(output[i]), static_cast<double>(sum * static_cast<T>(2.0 / 3)));
    }
    output.fill(1);
    fill_identity(output.data(), 3, dtype, ReduceOp::kSum);
    CHECK(std::ranges::all_of(output, [](T part) { return part == 0; }));
  };
  run(DType::kComplex64, 0.0f);
  run(DType::kComplex128, 0.0);
}

TEST(float16_conversions_are_exact_for_every_number) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const float value = to_float(half);
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const int fraction = static_cast<int>(bits & 1023);
    if (exponent == 31 && fraction != 0) {
      CHECK(std::isnan(value) && std::isnan(to_float(to_float16(value))));
      continue;
    }
    const double magnitude = exponent == 31  ? std::numeric_limits<double>::infinity()
                             : exponent == 0 ? std::ldexp(fraction, -24)
                                             : std::ldexp(1024 + fraction, exponent - 25);
    CHECK_EQ(static_cast<double>(std::fabs(value)), magnitude);
    CHECK_EQ(to_float16(value).bits, half.bits);  // the sign too
  }
}

TEST(float16_rounds_to_nearest_even) {
  // Between every two neighbours, up to 65536, the value in infinity's place.
  for (std::uint16_t lower = 0; lower < 0x7c00; ++lower) {
    const auto upper = static_cast<std::uint16_t>(lower + 1);
    const float above = upper == 0x7c00 ? 65536.0F : to_float(Float16{upper});
    const float middle = (to_float(Float16{lower}) + above) / 2;
    CHECK_EQ(to_float16(of_bits(bits_of(middle) - 1)).bits, lower);
    CHECK_EQ(to_float16(middle).bits, lower % 2 == 0 ? lower : upper);
    CHECK_EQ(to_float16(of_bits(bits_of(middle) + 1)).bits, upper);
    CHECK_EQ(to_float16(-middle).bits, 0x8000 | to_float16(middle).bits);
  }
  CHECK_EQ(to_float16(std::numeric_limits<float>::max()).bits, 0x7c00);
}

TEST(bfloat16_rounds_to_nearest_even) {
  for (std::uint32_t lower = 0; lower < 0x7f80; ++lower) {
    const std::uint32_t middle = lower << 16 | 0x8000;
    CHECK_EQ(to_float(BFloat16{static_cast<std::uint16_t>(lower)}), of_bits(lower << 16));
    CHECK_EQ(to_bfloat16(of_bits(lower << 16)).bits, lower);
    CHECK_EQ(to_bfloat16(of_bits(middle - 1)).bits, lower);
    CHECK_EQ(to_bfloat16(of_bits(middle)).bits, lower + lower % 2);
    CHECK_EQ(to_bfloat16(of_bits(middle + 1)).bits, lower + 1);
    CHECK_EQ(to_bfloat16(of_bits(middle | 0x80000000u)).bits, 0x8000 | (lower + lower % 2));
  }
  CHECK(std::isnan(to_float(to_bfloat16(of_bits(0x7f800001)))));  // would round to infinity
  CHECK(std::isnan(to_float(to_bfloat16(of_bits(0xffffffff)))));  // would wrap around
}

constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr DType kFloatingPoint[] = {DType::kFloat16, DType::kBFloat16,  DType::kFloat32,
                                    DType::kFloat64, DType::kComplex64, DType::kComplex128};

/// Numbers of a dtype; a complex one is two of them.
class Numbers {
 public:
  Numbers(DType dtype, std::size_t count)
      : dtype_(part_of(dtype)), bytes_(count * size_of(dtype_) + 1) {}

  void set(std::size_t i, double value) {
    const auto narrow = static_cast<float>(value);
    std::byte* const to = bytes_.data() + i * size_of(dtype_);
    if (dtype_ == DType::kFloat16) put(to, to_float16(narrow));
    if (dtype_ == DType::kBFloat16) put(to, to_bfloat16(narrow));
    if (dtype_ == DType::kFloat32) put(to, narrow);
    if (dtype_ == DType::kFloat64) put(to, value);
  }

  const void* data() const { return bytes_.data(); }

 private:
  template <class T>
  static void put(std::byte* to, T value) {
    std::memcpy(to, &value, sizeof value);
  }

  DType dtype_;
  std::vector<std::byte> bytes_;
};

Worst worst_of(const Numbers& numbers, std::size_t count, DType dtype, double limit = kNoLimit) {
  return torch_ring::worst_of(numbers.data(), count / parts_of(dtype), dtype, limit);
}

TEST(one_number_anywhere_is_found) {
  for (const DType dtype : kFloatingPoint) {
    for (const std::size_t count : {2UL, 30UL, 4096UL, 4098UL, 10000UL}) {
      for (const std::size_t place : {std::size_t{0}, count / 2, count - 1}) {
        Numbers numbers(dtype, count);
        for (std::size_t i = 0; i < count; ++i) numbers.set(i, 1.5 * (i % 5) - 3);
        CHECK(worst_of(numbers, count, dtype) == Worst::kFinite);
        for (const double sign : {1.0, -1.0}) {
          numbers.set(place, std::copysign(INFINITY, sign));
          CHECK(worst_of(numbers, count, dtype) == Worst::kInfinite);
          numbers.set(place, std::copysign(NAN, sign));
          CHECK(worst_of(numbers, count, dtype) == Worst::kNaN);
          numbers.set((place + 1) % count, INFINITY);  // a NaN is worse, before it or after it
          CHECK(worst_of(numbers, count, dtype) == Worst::kNaN);
          numbers.set((place + 1) % count, 0);
        }
      }
    }
    CHECK(worst_of(Numbers(dtype, 0), 0, dtype) == Worst::kFinite);
  }
}

TEST(the_largest_and_the_smallest_numbers_are_finite) {
  const auto most = [](DType dtype) {
    return dtype == DType::kFloat16    ? 65504.0
           : dtype == DType::kBFloat16 ? 0x1.fep127
           : dtype == DType::kFloat32  ? std::numeric_limits<float>::max()
                                       : std::numeric_limits<double>::max();
  };
  for (const DType dtype : kFloatingPoint) {
    Numbers numbers(dtype, 4);
    numbers.set(0, most(part_of(dtype)));
    numbers.set(1, -most(part_of(dtype)));
    numbers.set(2, std::numeric_limits<double>::denorm_min());
    numbers.set(3, -0.0);
    CHECK(worst_of(numbers, 4, dtype) == Worst::kFinite);
  }
}

TEST(numbers_above_a_limit_are_found) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    Numbers numbers(dtype, 5000);
    const double below = dtype == DType::kBFloat16 ? 65280 : 65504;
    for (const double sign : {1.0, -1.0}) {
      numbers.set(4999, sign * below);
      CHECK(worst_of(numbers, 5000, dtype, 65504) == Worst::kFinite);
      numbers.set(4999, sign * 65536);
      CHECK(worst_of(numbers, 5000, dtype, 65504) == Worst::kLarge);
      CHECK(worst_of(numbers, 5000, dtype) == Worst::kFinite);
      numbers.set(4999, sign * INFINITY);
      CHECK(worst_of(numbers, 5000, dtype, 65504) == Worst::kInfinite);
    }
  }
}

}  // namespace
}  // namespace torch_ring::test::reduce_test
