// PyHostMemory: the memory of this process's host, as Python holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collective/world.h"

namespace pybind11 {
class module_;
}

namespace torch_ring {

/// The memory of a host and this rank's arena in it, for all process sets.
///
/// Thread: any. Blocking: while the system looks for memory.
class PyHostMemory {
 public:
  /// `ranks`: those of this host, ascending; `rank`: this one. Errors: Error(kInternal) if `memory`
  /// is not that of such a host.
  PyHostMemory(Fd memory, std::vector<int> ranks, int rank);

  /// In a forked child: HostMemory::leave_to_parent().
  void abandon() const noexcept { host_->leave_to_parent(); }

  std::int64_t reserve_slot() { return static_cast<std::int64_t>(arena_->reserve()); }
  std::size_t used_bytes() const { return arena_->used_bytes(); }
  void release_slot(std::int64_t offset) { arena_->release(static_cast<std::size_t>(offset)); }

  /// Gives a set's `world` its slots and the arena. `members`: the set's ranks in the world, by
  /// rank in the set; `offsets`: of their slots. Errors: Error(kInternal) if another rank's offset
  /// cannot be one.
  void use(World& world, std::span<const int> members, std::span<const std::int64_t> offsets) const;

 private:
  const std::vector<int> ranks_;
  const std::shared_ptr<HostMemory> host_;
  std::vector<std::shared_ptr<const SharedMemory>> memories_;  // by index in the host
  std::shared_ptr<SharedArena> arena_;
};

void bind_host_memory(pybind11::module_& module);

}  // namespace torch_ring
