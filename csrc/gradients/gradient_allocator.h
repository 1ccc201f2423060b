// DirectGradient: lets autograd compute a large gradient in the memory in which it is reduced.
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
/// another tensor, which can live there as well as elsewhere; so when the gradient arrives, its
/// hook checks where it lies. Of several objects for one accumulator the last counts.
///
/// As long as an object or a block in use exists, torch's CPU allocator is another one
/// (c10::SetCPUAllocator), which passes all other requests on to the old one. A request costs one
/// comparison more, one of the size of a gradient in a backward pass a lock (docs/tuning.md). A
/// forked child gets no blocks.
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
