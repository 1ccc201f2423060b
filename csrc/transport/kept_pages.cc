#include "transport/kept_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace torch_ring {

namespace {

constexpr std::size_t kHugePage = 2u << 20;
constexpr std::size_t kMostBlocks = 16;

constexpr std::size_t rounded_up(std::size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

KeptPages::Block map(std::size_t bytes) {
  // One huge page more than needed, of which the ends are given back so that the rest is aligned.
  const std::size_t mapped = bytes + kHugePage;
  void* const memory =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  auto* const begin = static_cast<std::byte*>(memory);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::size_t before = rounded_up(address) - address;
  if (before > 0) ::munmap(begin, before);
  if (before < kHugePage) ::munmap(begin + before + bytes, kHugePage - before);
  ::madvise(begin + before, bytes, MADV_HUGEPAGE);  // where there are none, it does without
  return {begin + before, bytes};
}

void unmap(KeptPages::Block block) { ::munmap(block.data, block.bytes); }

}  // namespace

KeptPages::KeptPages(std::size_t most_bytes) : most_bytes_(most_bytes) {
  kept_.reserve(kMostBlocks + 1);
}

KeptPages::~KeptPages() {
  for (const Block block : kept_) unmap(block);
}

KeptPages::Block KeptPages::take(std::size_t bytes) noexcept {
  const std::size_t needed = rounded_up(bytes);
  if (needed < bytes) return {};
  const Block block = kept(needed);
  return block.data != nullptr ? block : map(needed);
}

KeptPages::Block KeptPages::kept(std::size_t bytes) noexcept {
  // A child that was forked while another thread held the lock never gets it.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return {};
  for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
    if (it->bytes < bytes || it->bytes - bytes > bytes / 4) continue;
    const Block block = *it;
    kept_.erase(std::next(it).base());
    kept_bytes_ -= block.bytes;
    return block;
  }
  return {};
}

void KeptPages::give_back(Block block) noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || block.bytes > most_bytes_) return unmap(block);
  ::madvise(block.data, block.bytes, MADV_FREE);
  kept_.push_back(block);
  kept_bytes_ += block.bytes;
  while (kept_bytes_ > most_bytes_ || kept_.size() > kMostBlocks) {
    kept_bytes_ -= kept_.front().bytes;
    unmap(kept_.front());
    kept_.erase(kept_.begin());
  }
}

std::size_t KeptPages::kept_bytes() const {
  const std::scoped_lock lock(mutex_);
  return kept_bytes_;
}

}  // namespace torch_ring
