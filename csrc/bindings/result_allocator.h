// empty_result(): memory for the results of collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace torch_ring {

/// An uninitialised contiguous tensor of this shape, with the dtype and device of `like`. On the
/// host, from 4 MiB on, its memory comes from a pool of pages, and returns there with the tensor
/// (memory/page_pool.h).
at::Tensor empty_result(const at::Tensor& like, at::IntArrayRef sizes);

/// The same with the shape and the layout of `like`, as at::empty_like(). A tensor with holes does
/// not come from the pool.
at::Tensor empty_result_like(const at::Tensor& like);

/// Keeps at most `most_bytes` in this process's pool; none before the first call.
void keep_results(std::size_t most_bytes);

/// The bytes that the pool keeps now.
std::size_t kept_result_bytes();

}  // namespace torch_ring
