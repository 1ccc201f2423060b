// SPDX-License-Identifier: Apache-2.0
// BlockPool: blocks of shared memory for the tensors that every step makes anew.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/home_process.h"

namespace torch_ring {

/// Blocks for tensors of expected sizes. The pool keeps a returned block for the next tensor of its
/// size, because the block has its pages already and every peer knows of it.
///
/// In a forked child the pool gives no blocks and takes none back: they are the parent's.
/// Thread: any. Blocking: while the system looks for memory.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  /// Returns null or throws when no memory is left.
  using Allocate = std::function<std::shared_ptr<void>(std::size_t bytes)>;

  static std::shared_ptr<BlockPool> make(Allocate allocate);

  /// Expects one more tensor of this size, or one less.
  void expect(std::size_t bytes);
  void expect_no_more(std::size_t bytes) noexcept;

  /// A block, which its last reference returns to the pool. Null if no tensor of this size is
  /// expected, if twice the expected number of blocks is in use, or if no memory is left.
  std::shared_ptr<void> take(std::size_t bytes) noexcept;

  /// The size of the blocks that wait for their next tensors.
  std::size_t vacant_bytes() const;

 private:
  using Block = std::shared_ptr<void>;

  struct Size {
    std::size_t expected = 0;
    std::size_t taken = 0;
    std::vector<Block> vacant;
  };

  explicit BlockPool(Allocate allocate);
  void give_back(Block block, std::size_t bytes) noexcept;

  const Allocate allocate_;
  const HomeProcess home_;
  mutable std::mutex mutex_;  // guards the members below
  std::map<std::size_t, Size> sizes_;
};

}  // namespace torch_ring
