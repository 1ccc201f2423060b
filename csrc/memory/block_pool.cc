// SPDX-License-Identifier: Apache-2.0
#include "memory/block_pool.h"

#include <exception>
#include <utility>

namespace torch_ring {

std::shared_ptr<BlockPool> BlockPool::make(Allocate allocate) {
  return std::shared_ptr<BlockPool>(new BlockPool(std::move(allocate)));
}

BlockPool::BlockPool(Allocate allocate) : allocate_(std::move(allocate)) {}

void BlockPool::expect(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  ++sizes_[bytes].expected;
}

void BlockPool::expect_no_more(std::size_t bytes) noexcept {
  if (!home_.is_here()) return;
  std::vector<Block> unneeded;  // freed without the lock
  const std::scoped_lock lock(mutex_);
  Size& size = sizes_[bytes];
  if (--size.expected == 0) unneeded = std::exchange(size.vacant, {});
}

std::shared_ptr<void> BlockPool::take(std::size_t bytes) noexcept {
  if (!home_.is_here()) return nullptr;
  try {
    Block block;
    {
      const std::scoped_lock lock(mutex_);
      const auto found = sizes_.find(bytes);
      if (found == sizes_.end()) return nullptr;
      Size& size = found->second;
      if (size.taken >= 2 * size.expected) return nullptr;
      if (!size.vacant.empty()) {
        block = std::move(size.vacant.back());
        size.vacant.pop_back();
      } else {
        block = allocate_(bytes);
        if (!block) return nullptr;
      }
      ++size.taken;
    }
    void* const data = block.get();
    return {data, [pool = weak_from_this(), block = std::move(block), bytes](void*) mutable {
              if (const auto alive = pool.lock()) alive->give_back(std::move(block), bytes);
            }};
  } catch (const std::exception&) {
    return nullptr;  // the caller takes private memory, which costs a copy
  }
}

std::size_t BlockPool::vacant_bytes() const {
  const std::scoped_lock lock(mutex_);
  std::size_t vacant = 0;
  for (const auto& [bytes, size] : sizes_) vacant += bytes * size.vacant.size();
  return vacant;
}

void BlockPool::give_back(Block block, std::size_t bytes) noexcept {
  if (!home_.is_here()) return;
  Block unneeded;
  const std::scoped_lock lock(mutex_);
  Size& size = sizes_[bytes];
  --size.taken;
  if (size.taken + size.vacant.size() < 2 * size.expected) {
    size.vacant.push_back(std::move(block));
  } else {
    unneeded = std::move(block);
  }
}

}  // namespace torch_ring
