// SPDX-License-Identifier: Apache-2.0
// DirectGradient: lets autograd compute a large gradient in the memory where it is reduced.
#pragma once

#include <cstddef>
#include <memory>

#include "memory/block_pool.h"

namespace torch::autograd {
struct Node;
}

namespace torch_ring {

/// While this lives, a backward pass gets a block of shared memory for one parameter's gradient on
/// the host. It serves an allocation of exactly `bytes` by `accumulator`, by the node before it, or
/// by the one before that (as for a transposed or converted weight). Such an allocation may become
/// another tensor, to which its place makes no difference; so when the gradient arrives, its hook
/// checks its place. Of several objects for one accumulator the last one counts.
///
/// While an object or a block in use exists, torch's CPU allocator is replaced
/// (c10::SetCPUAllocator) by one that passes all other requests on to the old one. A request costs
/// one more comparison, or a lock if it has the size of a gradient and comes from a backward pass
/// (docs/tuning.md). A forked child gets no blocks.
///
/// Thread: any. Blocking: while the system looks for memory.
class DirectGradient {
 public:
  /// `accumulator` outlives this.
  DirectGradient(std::shared_ptr<BlockPool> blocks, const torch::autograd::Node* accumulator,
                 std::size_t bytes);
  ~DirectGradient();
  DirectGradient(const DirectGradient&) = delete;
  DirectGradient& operator=(const DirectGradient&) = delete;

  /// Whether a block for this gradient begins at `data`, and this is its accumulator's last object.
  bool got(const void* data) const;

  BlockPool& blocks() const { return *blocks_; }
  const torch::autograd::Node* accumulator() const { return accumulator_; }
  std::size_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<BlockPool> blocks_;
  const torch::autograd::Node* const accumulator_;
  const std::size_t bytes_;
};

}  // namespace torch_ring
