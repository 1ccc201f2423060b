// SPDX-License-Identifier: Apache-2.0
#include "collective/adasum.h"

#include "collective/plan.h"
#include "elements.h"
#include "test_world.h"

namespace torch_ring::test::adasum_test {
namespace {

/// A rank's tensors, one after the other.
using Vector = std::vector<double>;

// One tensor is longer than two segments of shared memory; some have no part on some ranks.
constexpr std::size_t kLong = kSanitized ? 66'001 : 70'001;
const std::vector<std::size_t> kCounts{1, 1000, 0, kLong, 3, 5};
constexpr std::size_t kCount = 1 + 1000 + kLong + 3 + 5;

/// A rank's vector: whole numbers below 256, which all dtypes hold, with different norms and
/// directions on every rank. The second tensor is zero on odd ranks, the last one on all.
Vector vector_of(int rank) {
  Vector vector;
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto r = static_cast<std::size_t>(rank);
    const double value = static_cast<double>((7 * i + i / 13 * r + 5 * r) % 17) - 6;
    const bool zero = i >= kCount - 5 || (rank % 2 == 1 && i >= 1 && i < 1001);
    vector.push_back(zero ? 0 : (1 + rank % 3) * value);
  }
  return vector;
}

Vector pairwise(const Vector& a, const Vector& b) {
  Vector sum;
  for (const Range tensor : ranges_of(kCounts)) {
    double ab = 0;
    double aa = 0;
    double bb = 0;
    for (std::size_t i = tensor.begin; i < tensor.begin + tensor.count; ++i) {
      ab += a[i] * b[i];
      aa += a[i] * a[i];
      bb += b[i] * b[i];
    }
    for (std::size_t i = tensor.begin; i < tensor.begin + tensor.count; ++i) {
      sum.push_back((aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] +
                    (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i]);
    }
  }
  return sum;
}

/// The adaptive sum of ranks first, first + 1, ...: of neighbours first, then of pairs, and so on.
Vector expected(int first, int ranks) {
  if (ranks == 1) return vector_of(first);
  return pairwise(expected(first, ranks / 2), expected(first + ranks / 2, ranks / 2));
}

/// The relative error of rounding a result once.
double rounding(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : dtype == DType::kFloat16 ? 0x1p-11 : 0;
}

void is_the_pairwise_formula(const Layout& layout, int size) {
  const Vector sum = expected(0, size);
  std::vector<Vector> vectors;
  for (int rank = 0; rank < size; ++rank) vectors.push_back(vector_of(rank));
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<Elements> results(static_cast<std::size_t>(size), Elements(dtype, kCount));
    run_world(layout, size, [&](Communicator& communicator, Abort&) {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      for (std::size_t i = 0; i < kCount; ++i) results[rank].set(i, vectors[rank][i]);
      adasum(communicator, results[rank].data(), kCounts, dtype);
    });
    for (const Elements& result : results) CHECK(same(result.bytes(), results[0].bytes()));
    const double computed = dtype == DType::kFloat64 ? 1e-11 : 3e-5;  // for numbers up to 50
    const double subnormal = dtype == DType::kFloat16 ? 0x1p-14 : 0;  // Elements reads none
    for (std::size_t i = 0; i < kCount; ++i) {
      const double error = std::fabs(results[0].at(i) - sum[i]);
      if (error <= rounding(dtype) * std::fabs(sum[i]) + computed + subnormal) continue;
      fail(__FILE__, __LINE__,
           std::string(name_of(dtype)) + " [" + std::to_string(i) + "] is " +
               shown(results[0].at(i)) + ", not " + shown(sum[i]));
    }
  }
}

const bool added = [] {
  for (const Layout& layout :
       {Layout{"shm", one_host, {1, 2, 4, 8}}, Layout{"ring", one_rank_a_host, {2, 4, 8}},
        Layout{"two hosts in turns", two_hosts_in_turns, {4}},
        Layout{"three hosts", three_hosts, {8}}}) {
    add_for_sizes(layout, "adasum is the pairwise formula", is_the_pairwise_formula);
  }
  return true;
}();

TEST(adasum_refuses_invalid_dtype_or_size_before_moving_data) {
  std::byte data[64]{};
  const std::vector<std::size_t> counts{3};
  const auto refuses = [&](int size, DType dtype, const char* what) {
    run_world({"shm", one_host}, size, [&](Communicator& communicator, Abort&) {
      if (communicator.rank() == 0) {  // alone: a collective would wait for the others
        CHECK_THROWS(adasum(communicator, data, counts, dtype), ErrorKind::kInvalidArgument, what);
      }
    });
  };
  refuses(3, DType::kFloat32, "a power of two of ranks, not float32 and 3");
  refuses(2, DType::kInt32, "floating point");
  refuses(2, DType::kBool, "floating point");
}

}  // namespace
}  // namespace torch_ring::test::adasum_test
