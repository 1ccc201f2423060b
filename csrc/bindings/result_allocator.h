// ResultAllocator: memory for the results of collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace torch_ring {

/// An uninitialised tensor of this shape, contiguous, with the dtype and device of `like`.
/// On the host, from 4 MiB on, its memory comes from a pool of pages, which keeps it for the next
/// when the tensor goes (memory/page_pool.h).
at::Tensor empty_result(const at::Tensor& like, at::IntArrayRef sizes);

/// The same with the shape and the layout of `like`, as at::empty_like(). Of a tensor with holes
/// nothing is kept.
at::Tensor empty_result_like(const at::Tensor& like);

/// Keeps at most so many bytes in this process; none before the first call.
void keep_results(std::size_t most_bytes);

/// The bytes that are kept at present.
std::size_t kept_result_bytes();

}  // namespace torch_ring
