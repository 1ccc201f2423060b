// scale(), widened(), narrow(): the arithmetic of a reduction that NCCL lacks, on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/reduce.h"

namespace torch_ring {

/// output = input * scaling.prescale * scaling.postscale / scaling.divisor. Of floating point and
/// complex: by one factor, 16-bit floats in float32, rounded once. Integers, which have no divisor
/// here: in float64, truncated toward zero and clamped to the range of the dtype. Booleans are
/// copied. `output` may be `input`, or another tensor over the same memory.
void scale(const at::Tensor& output, const at::Tensor& input, const Scaling& scaling);

/// `tensor`, integers of one dimension, for a reduction that would wrap around in its dtype, or for
/// which NCCL has none: in int32 or int64. An int64 of an Average of n ranks becomes two numbers,
/// its quotient by n and the remainder, because the sums of n of these fit int64.
at::Tensor widened(const at::Tensor& tensor, const Reduction& reduction);

/// Writes the reduction to `output`, scaled but for the prescale, which its inputs have. `wide` are
/// the reduced numbers of widened().
void narrow(const at::Tensor& output, const at::Tensor& wide, const Reduction& reduction);

}  // namespace torch_ring
