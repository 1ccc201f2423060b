#include "transport/shared_arena.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "core/error.h"

namespace torch_ring {

namespace {
constexpr std::size_t kPage = 4096;
}

SharedArena::SharedArena(std::shared_ptr<const SharedMemory> memory)
    : memory_(std::move(memory)), pid_(::getpid()) {
  const std::size_t bytes = memory_->size_bytes() - SharedMemory::kArena;
  free_.emplace(SharedMemory::kArena, bytes / kPage * kPage);
}

void* SharedArena::allocate(std::size_t bytes) {
  const std::size_t wanted = std::max<std::size_t>((bytes + kPage - 1) / kPage, 1) * kPage;
  const std::scoped_lock lock(mutex_);
  const auto hole = std::find_if(free_.begin(), free_.end(),
                                 [&](const auto& range) { return range.second >= wanted; });
  if (hole == free_.end()) {
    throw Error(ErrorKind::kInternal,
                "no " + std::to_string(bytes) + " bytes of shared memory are left");
  }
  const auto [offset, hole_bytes] = *hole;
  memory_->commit(offset, wanted);
  free_.erase(hole);
  if (hole_bytes > wanted) free_.emplace(offset + wanted, hole_bytes - wanted);
  used_.emplace(offset, wanted);
  return memory_->at(offset);
}

void SharedArena::free(void* data) noexcept {
  if (::getpid() != pid_) return;
  const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(data) - memory_->at(0));
  const std::scoped_lock lock(mutex_);
  const auto used = used_.find(offset);
  if (used == used_.end()) return;
  memory_->release(used->first, used->second);
  auto hole = free_.emplace(used->first, used->second).first;
  used_.erase(used);
  const auto after = std::next(hole);
  if (after != free_.end() && hole->first + hole->second == after->first) {
    hole->second += after->second;
    free_.erase(after);
  }
  if (hole == free_.begin()) return;
  const auto before = std::prev(hole);
  if (before->first + before->second == hole->first) {
    before->second += hole->second;
    free_.erase(hole);
  }
}

std::int64_t SharedArena::offset_of(const void* data, std::size_t bytes) const noexcept {
  const auto base = reinterpret_cast<std::uintptr_t>(memory_->at(0));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const bool inside = address >= base + SharedMemory::kArena &&
                      address + bytes <= base + memory_->size_bytes() && address + bytes >= address;
  return inside ? static_cast<std::int64_t>(address - base) : -1;
}

}  // namespace torch_ring
