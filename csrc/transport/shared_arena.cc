// SPDX-License-Identifier: Apache-2.0
#include "transport/shared_arena.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "core/error.h"

namespace torch_ring {

namespace {

// The kernel's page: 64 KiB on some ARM machines. Memory is isolated and discarded by whole pages.
const auto kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));

/// Calls apply(offset, bytes) for the huge pages that no allocation but [offset, offset + bytes)
/// uses. `hole` is the free range around it, before allocate() or after free().
template <class Apply>
void for_own_huge_pages(std::size_t offset, std::size_t bytes, std::size_t hole,
                        std::size_t hole_bytes, Apply&& apply) {
  const std::size_t begin = std::max(huge_page_floor(offset), huge_page_ceil(hole));
  const std::size_t end =
      std::min(huge_page_ceil(offset + bytes), huge_page_floor(hole + hole_bytes));
  if (begin < end) apply(begin, end - begin);
}

}  // namespace

SharedArena::SharedArena(std::shared_ptr<const SharedMemory> memory) : memory_(std::move(memory)) {
  free_.emplace(SharedMemory::kArena,
                huge_page_floor(memory_->size_bytes() - SharedMemory::kArena));
}

void* SharedArena::allocate(std::size_t bytes) {
  const std::size_t wanted = std::max<std::size_t>((bytes + kPage - 1) / kPage, 1) * kPage;
  const std::scoped_lock lock(mutex_);
  const auto hole = std::find_if(free_.begin(), free_.end(), [&](const auto& range) {
    return range.second >= bytes && range.second >= wanted;  // huge `bytes` make `wanted` overflow
  });
  if (hole == free_.end()) return nullptr;
  const auto [offset, hole_bytes] = *hole;
  for_own_huge_pages(offset, wanted, offset, hole_bytes,
                     [&](std::size_t at, std::size_t part) { memory_->commit_huge(at, part); });
  take(hole, offset, wanted);
  return memory_->at(offset);
}

void SharedArena::free(void* data) noexcept {
  if (!home_.is_here()) return;
  const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(data) - memory_->at(0));
  const std::scoped_lock lock(mutex_);
  const auto used = used_.find(offset);
  if (used == used_.end()) return;
  const auto [begin, bytes] = *used;
  if (is_isolated(begin, bytes)) {
    memory_->discard(begin, bytes);
    used_.erase(used);
    return;
  }
  const auto hole = give_back(used);
  for_own_huge_pages(begin, bytes, hole->first, hole->second,
                     [&](std::size_t at, std::size_t part) { memory_->release(at, part); });
}

void SharedArena::isolate(const void* data, std::size_t bytes) noexcept {
  const std::int64_t offset = offset_of(data, bytes);
  if (offset < 0 || bytes == 0 || !home_.is_here()) return;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = static_cast<std::size_t>(offset) / page * page;
  const std::size_t end = (static_cast<std::size_t>(offset) + bytes + page - 1) / page * page;
  const std::scoped_lock lock(mutex_);
  isolated_.emplace_back(begin, end - begin);
  any_isolated_.store(true, std::memory_order_release);
  memory_->isolate(begin, end - begin);
}

bool SharedArena::is_isolated(std::size_t offset, std::size_t bytes) const {
  return std::ranges::any_of(isolated_, [&](const auto& range) {
    return range.first < offset + bytes && offset < range.first + range.second;
  });
}

std::size_t SharedArena::reserve() {
  const std::scoped_lock lock(mutex_);
  // The last huge pages of the last range that has enough of them.
  const auto slot_in = [](const auto& range) {
    const std::size_t end = huge_page_floor(range.first + range.second);
    return end - std::min(end, Slot::kBytes);
  };
  const auto hole = std::find_if(free_.rbegin(), free_.rend(), [&](const auto& range) {
    return range.second >= Slot::kBytes && slot_in(range) >= range.first;
  });
  if (hole == free_.rend()) {
    throw Error(ErrorKind::kInternal,
                "this rank's part of the shared memory, " +
                    std::to_string(memory_->size_bytes() >> 20) +
                    " MiB of address space, has no room for another set of ranks: raise "
                    "`ulimit -v`, or remove sets");
  }
  const std::size_t offset = slot_in(*hole);
  // Nothing should be there, but a late ring may have touched a page since the last release.
  memory_->release(offset, Slot::kBytes);
  memory_->commit(offset, Slot::kHeaderBytes);
  take(std::prev(hole.base()), offset, Slot::kBytes);
  return offset;
}

void SharedArena::release(std::size_t slot) noexcept {
  if (!home_.is_here()) return;
  const std::scoped_lock lock(mutex_);
  const auto used = used_.find(slot);
  if (used == used_.end()) return;
  memory_->release(slot, Slot::kBytes);
  give_back(used);
}

std::size_t SharedArena::used_bytes() const {
  const std::scoped_lock lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [offset, length] : used_) bytes += length;
  return bytes;
}

void SharedArena::take(Ranges::iterator hole, std::size_t offset, std::size_t bytes) {
  const auto [begin, hole_bytes] = *hole;
  const std::size_t end = begin + hole_bytes;
  free_.erase(hole);
  if (begin < offset) free_.emplace(begin, offset - begin);
  if (offset + bytes < end) free_.emplace(offset + bytes, end - (offset + bytes));
  used_.emplace(offset, bytes);
}

SharedArena::Ranges::iterator SharedArena::give_back(Ranges::iterator used) {
  auto hole = free_.insert(used_.extract(used)).position;
  const auto after = std::next(hole);
  if (after != free_.end() && hole->first + hole->second == after->first) {
    hole->second += after->second;
    free_.erase(after);
  }
  if (hole == free_.begin()) return hole;
  const auto before = std::prev(hole);
  if (before->first + before->second != hole->first) return hole;
  before->second += hole->second;
  free_.erase(hole);
  return before;
}

std::int64_t SharedArena::offset_of(const void* data, std::size_t bytes) const noexcept {
  const auto base = reinterpret_cast<std::uintptr_t>(memory_->at(0));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const bool inside = address >= base + SharedMemory::kArena &&
                      address + bytes <= base + memory_->size_bytes() && address + bytes >= address;
  if (!inside) return -1;
  const std::size_t offset = address - base;
  if (any_isolated_.load(std::memory_order_acquire)) {
    const std::scoped_lock lock(mutex_);
    if (is_isolated(offset, bytes)) return -1;
  }
  return static_cast<std::int64_t>(offset);
}

}  // namespace torch_ring
