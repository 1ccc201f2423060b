// scaled(), scale_result(), ...: the arithmetic of a reduction that NCCL lacks, on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/reduce.h"

namespace torch_ring {

/// tensor * factor in the tensor's dtype: floating point in at least float32, integers in float64,
/// truncated toward zero and clamped to the range of the dtype. Booleans are not scaled.
at::Tensor scaled(const at::Tensor& tensor, double factor);

/// tensor = tensor * scaling.postscale / scaling.divisor, computed as in core/reduce.h.
void scale_result(const at::Tensor& tensor, const Scaling& scaling);

/// `tensor`, integers of one dimension, for a reduction that would wrap around in its dtype, or for
/// which NCCL has none: in int32 or int64. An int64 of an Average of n ranks becomes two numbers,
/// its quotient by n and the remainder, because the sums of n of these fit int64.
at::Tensor widened(const at::Tensor& tensor, const Reduction& reduction);

/// Writes the scaled reduction to `output`. `wide` are the reduced numbers of widened().
void narrow(const at::Tensor& output, const at::Tensor& wide, const Reduction& reduction);

}  // namespace torch_ring
