// SPDX-License-Identifier: Apache-2.0
#include "memory/page_pool.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "memory/huge_pages.h"

namespace torch_ring {

/// A block's header, in a page of its own before the data.
struct PagePool::Block {
  std::size_t bytes;
  Block* older = nullptr;

  static constexpr std::size_t kPage = 64u << 10;  // bytes: the largest page of any machine

  static Block* of(void* data) {
    return reinterpret_cast<Block*>(static_cast<std::byte*>(data) - kPage);
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(this) + kPage; }

  /// `bytes`: whole huge pages.
  static Block* map(std::size_t bytes) {
    std::byte* const data = map_at_huge_page(bytes, kPage, PROT_READ | PROT_WRITE);
    if (data == nullptr) return nullptr;
    ::madvise(data, bytes, MADV_HUGEPAGE);  // without effect where there are no huge pages
    return new (data - kPage) Block{bytes};
  }

  void unmap() { ::munmap(this, kPage + bytes); }
};

PagePool::~PagePool() { drop_oldest_until(0); }

std::size_t PagePool::bytes_of(const void* data) {
  return Block::of(const_cast<void*>(data))->bytes;
}

void* PagePool::take(std::size_t bytes) noexcept {
  const std::size_t needed = huge_page_ceil(bytes);
  if (needed < bytes) return nullptr;
  Block* block = take_kept(needed);
  if (block != nullptr && ::madvise(block->data(), block->bytes, MADV_KEEPONFORK) != 0) {
    block->unmap();
    block = nullptr;
  }
  if (block == nullptr) block = Block::map(needed);
  return block != nullptr ? block->data() : nullptr;
}

/// The smallest kept block that fits; of several, the most recent.
PagePool::Block* PagePool::take_kept(std::size_t bytes) noexcept {
  // A child that was forked while another thread held the lock can never take it.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return nullptr;
  Block** best = nullptr;
  for (Block** at = &newest_; *at != nullptr; at = &(*at)->older) {
    const std::size_t size = (*at)->bytes;
    if (size < bytes || size - bytes > bytes / 4) continue;
    if (best == nullptr || size < (*best)->bytes) best = at;
  }
  if (best == nullptr) return nullptr;
  Block* const block = *best;
  *best = block->older;
  kept_bytes_ -= block->bytes;
  return block;
}

void PagePool::give_back(void* data) noexcept {
  Block* const block = Block::of(data);
  ::madvise(data, block->bytes, MADV_FREE);
  ::madvise(data, block->bytes, MADV_WIPEONFORK);
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const std::size_t most_bytes = most_bytes_;
  const bool is_kept = lock && block->bytes <= most_bytes;
  if (is_kept) {
    block->older = newest_;
    newest_ = block;
    kept_bytes_ += block->bytes;
  }
  if (lock) drop_oldest_until(most_bytes);
  if (!is_kept) block->unmap();
}

void PagePool::limit(std::size_t most_bytes) noexcept {
  most_bytes_ = most_bytes;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) drop_oldest_until(most_bytes);
}

void PagePool::drop_oldest_until(std::size_t most_bytes) noexcept {
  while (kept_bytes_ > most_bytes) {
    Block** at = &newest_;
    while ((*at)->older != nullptr) at = &(*at)->older;
    Block* const oldest = *at;
    *at = nullptr;
    kept_bytes_ -= oldest->bytes;
    oldest->unmap();
  }
}

}  // namespace torch_ring
