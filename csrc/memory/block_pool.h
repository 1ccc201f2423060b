// BlockPool: shared memory for tensors that come and go in every step.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace torch_ring {

/// Blocks for tensors of expected sizes. A block that is given back is kept for the next tensor of
/// its size: its pages are there, and no peer has to learn of a new one.
///
/// In a forked child it has no blocks and takes none back: they are its parent's.
/// Thread: any. Blocking: while the system looks for memory.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  /// Returns null, or throws, when there is no more.
  using Allocate = std::function<std::shared_ptr<void>(std::size_t bytes)>;

  static std::shared_ptr<BlockPool> make(Allocate allocate);

  /// One more, or one less, tensor of this size is expected.
  void expect(std::size_t bytes);
  void expect_no_more(std::size_t bytes) noexcept;

  /// A block, which goes back when the last reference goes. Null if tensors of this size are not
  /// expected, if twice as many as are expected have one already, or if the memory is used up.
  std::shared_ptr<void> take(std::size_t bytes) noexcept;

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
  const pid_t pid_;
  std::mutex mutex_;  // guards what follows
  std::map<std::size_t, Size> sizes_;
};

}  // namespace torch_ring
