// SharedArena: an allocator in a rank's own shared memory, for buckets.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "transport/shared_memory.h"

namespace torch_ring {

/// A first-fit allocator of whole pages, in memory of huge pages. A huge page is committed with the
/// first allocation in it and released with the last. The peers have mapped the whole arena from
/// the start, so no allocation is announced: its offset is enough to find it. In a forked child
/// free() does nothing: the memory is the parent's.
/// Thread: any. Blocking: while the system looks for memory.
class SharedArena {
 public:
  /// The arena keeps `memory` alive.
  explicit SharedArena(std::shared_ptr<const SharedMemory> memory);

  /// Errors: Error(kInternal) when the host has no more memory.
  void* allocate(std::size_t bytes);
  void free(void* data) noexcept;

  /// The offset of [data, data + bytes) from the beginning of the memory, or -1 if it lies
  /// elsewhere.
  std::int64_t offset_of(const void* data, std::size_t bytes) const noexcept;

 private:
  const std::shared_ptr<const SharedMemory> memory_;
  const pid_t pid_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes, neighbours joined
  std::map<std::size_t, std::size_t> used_;
};

}  // namespace torch_ring
