// Lets autograd compute large gradients in the memory in which they are reduced.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>

#include "transport/block_cache.h"

namespace torch_ring {

/// From now on, what a backward pass allocates on the host for this parameter's gradient is one of
/// `blocks`: what a node asks for just before `accumulator`, or one node earlier (as a transposed
/// or converted weight has), if it has exactly so many bytes. It may become another tensor, which
/// can live there as well as elsewhere: when the gradient arrives, its hook looks where it lies.
///
/// The first call makes torch's CPU allocator (c10::SetCPUAllocator) one that passes on all other
/// requests to the one before it, for the price of a comparison if they are small, or outside of
/// backward passes. It stays to the end of the process.
///
/// `accumulator` lives until it is withdrawn.
/// Thread: any. Blocking: no.
void allocate_gradient_in(const std::shared_ptr<BlockCache>& blocks,
                          const torch::autograd::Node* accumulator, std::size_t bytes);
void withdraw_gradient(const torch::autograd::Node* accumulator) noexcept;

}  // namespace torch_ring
