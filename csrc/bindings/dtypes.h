// SPDX-License-Identifier: Apache-2.0
// dtype_of() and scalar_type_of(): torch's dtypes and ours.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "core/types.h"

namespace torch_ring {

/// The dtype of `tensor`. Errors: Error(kInvalidArgument) if torch_ring does not support it.
DType dtype_of(const at::Tensor& tensor);

at::ScalarType scalar_type_of(DType dtype);

/// Checks that there is an operator for the dtype. `what` begins the message.
/// Errors: Error(kInvalidArgument), which lists the supported dtypes or operators.
void check_reducible(DType dtype, ReduceOp op, const std::string& what);

}  // namespace torch_ring
