// SPDX-License-Identifier: Apache-2.0
// reduce(): the arithmetic of a reduction.
//
// Every communicator reduces with the functions below, so a result does not depend on the path that
// the data took. 16-bit floats are accumulated in float32. A floating-point result is scaled once,
// in the accumulation dtype. Complex numbers are reduced as their two parts.
//
// A sum of integers wraps around, as torch's does. An Average does not: its sum is kept in a wider
// dtype, and divided there, toward zero. Whole factors multiply integers exactly, others in
// float64; the product is truncated toward zero, and clamped to the range of the dtype.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/types.h"

namespace torch_ring {

struct Scaling {
  double prescale = 1.0;     // multiplies every input before it is reduced
  double postscale = 1.0;    // multiplies the result
  std::int64_t divisor = 1;  // divides the result: the number of ranks of an Average
};

/// Dtype, operator and factors of a reduction. `op` is never kAverage (a Sum with a divisor) or
/// kAdasum.
struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Scaling scaling;
};

/// Whether a factor multiplies integers exactly.
inline bool is_whole(double factor) {
  return std::trunc(factor) == factor && std::abs(factor) < 0x1p63;
}

/// Whether the reduction is an Average of integers.
constexpr bool averages_integers(const Reduction& reduction) {
  return is_integer(reduction.dtype) && reduction.op == ReduceOp::kSum &&
         reduction.scaling.divisor != 1;
}

/// The dtype of partial results: float32 for 16-bit floats; for an Average of integers one that
/// holds the sum of 2^16 of them or more; the dtype itself otherwise.
constexpr DType accumulation_dtype(const Reduction& reduction) {
  const DType dtype = reduction.dtype;
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return DType::kFloat32;
  if (!averages_integers(reduction)) return dtype;
  if (size_of(dtype) < 4) return DType::kInt32;
  return dtype == DType::kInt32 ? DType::kInt64 : DType::kInt128;
}

/// outputs[j][i] = post(op over r of pre(inputs[r][i])), for every j. Inputs are reduced in the
/// order given. An output may be one of the inputs; other overlaps are not allowed.
void reduce(std::span<void* const> outputs, std::span<const void* const> inputs, std::size_t count,
            const Reduction& reduction);

/// The first half of reduce(): partial[i] = op over r of pre(inputs[r][i]). `partial` has
/// accumulation_dtype(reduction).
void reduce_partial(void* partial, std::span<const void* const> inputs, std::size_t count,
                    const Reduction& reduction);

/// partial[i] = op(partial[i], other[i]), both of accumulation_dtype(reduction).
void combine_partial(void* partial, const void* other, std::size_t count,
                     const Reduction& reduction);

/// data[i] = the identity of `op`: 0, 1, an end of the dtype's range, or all bits set.
void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op);

/// The second half of reduce(): outputs[j][i] = post(partial[i]) in reduction.dtype. One output may
/// be `partial` itself when the two dtypes are the same.
void finish_partial(std::span<void* const> outputs, const void* partial, std::size_t count,
                    const Reduction& reduction);

}  // namespace torch_ring
