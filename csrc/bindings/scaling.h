// scaled() and scale_result(): the factors of a reduction, on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/reduce.h"

namespace torch_ring {

/// tensor * factor in the tensor's dtype: floating point in at least float32, integers in float64,
/// truncated toward zero.
at::Tensor scaled(const at::Tensor& tensor, double factor);

/// tensor = tensor * scaling.postscale / scaling.divisor, computed as in core/reduce.h.
void scale_result(const at::Tensor& tensor, const Scaling& scaling);

}  // namespace torch_ring
