// SPDX-License-Identifier: Apache-2.0
// SharedArena: an allocator in a rank's own shared memory, for buckets and slots.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/home_process.h"
#include "transport/shared_memory.h"

namespace torch_ring {

/// A first-fit allocator of whole pages, in memory of huge pages. A huge page is committed with the
/// first allocation in it and released with the last. The peers have mapped the whole arena from
/// the start, so no allocation is announced: its offset is enough to find it. Slots of process sets
/// are taken from its end, so that they do not divide the memory of the buckets. In a forked child
/// free() and release() do nothing: the memory is the parent's.
/// Thread: any. Blocking: while the system looks for memory.
class SharedArena {
 public:
  /// The arena keeps `memory` alive.
  explicit SharedArena(std::shared_ptr<const SharedMemory> memory);

  /// Null if the arena has no room. Errors: Error(kInternal) when the host has no more memory.
  void* allocate(std::size_t bytes);
  void free(void* data) noexcept;

  /// Gives [data, data + bytes) private pages with the same content. They are no longer shared
  /// memory, and no later allocation gets their place: a peer may still write there. Does nothing
  /// if it lies elsewhere, or if the system has no memory. Other threads may write to it meanwhile.
  void isolate(const void* data, std::size_t bytes) noexcept;

  /// The offset of a new slot in this rank's memory. It reads as zeros, and only its header's page
  /// is committed. Errors: Error(kInternal) if there is no room, or no more memory.
  std::size_t reserve();
  /// Releases a slot that no rank touches any more.
  void release(std::size_t slot) noexcept;

  /// Bytes that are allocated and reserved now: whole pages, including untouched ones of slots.
  /// Cost: O(allocations).
  std::size_t used_bytes() const;

  /// The offset of [data, data + bytes) from the beginning of the memory, or -1 if it lies
  /// elsewhere, or a part of it is isolated.
  std::int64_t offset_of(const void* data, std::size_t bytes) const noexcept;

 private:
  using Ranges = std::map<std::size_t, std::size_t>;  // offset -> bytes

  /// Moves [offset, offset + bytes), a part of `hole`, from free_ to used_.
  void take(Ranges::iterator hole, std::size_t offset, std::size_t bytes);
  /// Moves `used` from used_ to free_; returns the free range in which it lies now.
  Ranges::iterator give_back(Ranges::iterator used);
  /// Whether a part of [offset, offset + bytes) is isolated.
  bool is_isolated(std::size_t offset, std::size_t bytes) const;

  const std::shared_ptr<const SharedMemory> memory_;
  const HomeProcess home_;
  mutable std::mutex mutex_;  // guards the members below
  Ranges free_;               // neighbours joined
  Ranges used_;
  std::vector<std::pair<std::size_t, std::size_t>> isolated_;  // offset, bytes: whole pages
  std::atomic<bool> any_isolated_{false};  // stored after isolated_ has changed, under the mutex
};

}  // namespace torch_ring
