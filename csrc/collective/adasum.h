// SPDX-License-Identifier: Apache-2.0
// adasum(): adaptive summation, which adds orthogonal gradients and averages parallel ones.
#pragma once

#include <cstddef>
#include <span>

#include "collective/chunk.h"
#include "collective/communicator.h"

namespace torch_ring {

/// Reduces `data`, consecutive tensors of the given lengths, over the ranks, in place. Two tensors
/// a and b become
///
///     (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
///
/// and so on with the results, along a binary tree of the ranks. The factor of a tensor of zeros is
/// 1. The algorithm is vector halving and distance doubling (S. Maleki et al., "Scaling Distributed
/// Training with Adaptive Summation", MLSys 2021): log2(n) exchanges of halves, quarters, ..., each
/// with one allgather of 3 dot products a tensor, then an allgather of the results.
///
/// 16-bit floats are computed in float32 and rounded once; dot products are float64. All ranks get
/// the same bits. Every tensor is halved separately, so that its bits do not depend on the others.
///
/// Errors: Error(kInvalidArgument), before anything has moved, unless the number of ranks is a
/// power of two and the dtype is floating-point; the communicator's.
void adasum(Communicator& communicator, void* data, std::span<const std::size_t> counts,
            DType dtype);

/// The part of a tensor of `count` elements that `rank` works on after `halvings` exchanges.
Range adasum_range(std::size_t count, int rank, int halvings);

}  // namespace torch_ring
