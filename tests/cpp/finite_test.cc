// SPDX-License-Identifier: Apache-2.0
#include "core/finite.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "core/half.h"
#include "harness.h"

namespace torch_ring::test::finite_test {

namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16,  DType::kFloat32,
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

}  // namespace

TEST(one_number_anywhere_is_found) {
  for (const DType dtype : kDTypes) {
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
  for (const DType dtype : kDTypes) {
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

}  // namespace torch_ring::test::finite_test
