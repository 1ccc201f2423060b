// Memory for what collectives return.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_ring {

/// An uninitialised tensor of this shape, contiguous, with the dtype and device of `like`.
/// On the host the memory of a large one comes from pages that are kept for the next when the
/// tensor goes (KeptPages), at most 256 MiB in the process.
at::Tensor empty_result(at::IntArrayRef sizes, const at::Tensor& like);

/// The same with the shape and the layout of `like`, as at::empty_like().
at::Tensor empty_result_like(const at::Tensor& like);

}  // namespace torch_ring
