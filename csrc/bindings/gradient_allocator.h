// DirectGradient: lets autograd compute a large gradient in the memory in which it is reduced.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>

#include "memory/block_pool.h"

namespace torch_ring {

/// As long as it lives, what a backward pass allocates on the host for one parameter's gradient is
/// a block of shared memory: what a node asks for just before `accumulator`, or one node earlier
/// (as for a transposed or converted weight), if it has exactly so many bytes. It may become
/// another tensor, which can live there as well as elsewhere: when the gradient arrives, its hook
/// looks where it lies. Of several for one accumulator the last counts.
///
/// The first one makes torch's CPU allocator (c10::SetCPUAllocator) one that passes on all other
/// requests to the one before it, for the price of a comparison if they are small or made outside
/// of backward passes. It stays to the end of the process. A forked child gets no blocks;
/// what it has inherited it shares with its parent, as it does buckets.
///
/// Thread: any. Blocking: while the system looks for memory.
class DirectGradient {
 public:
  /// `accumulator` lives longer.
  DirectGradient(std::shared_ptr<BlockPool> blocks, const torch::autograd::Node* accumulator,
                 std::size_t bytes);
  ~DirectGradient();
  DirectGradient(const DirectGradient&) = delete;
  DirectGradient& operator=(const DirectGradient&) = delete;

  /// Whether a block that torch has got for this gradient begins here, and this is what counts.
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
