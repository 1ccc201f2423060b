// SPDX-License-Identifier: Apache-2.0
// SharedMemory: one rank's part of its host's memory, which the other ranks read and write.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "transport/host_memory.h"
#include "transport/slot.h"

namespace torch_ring {

/// The map of a rank's memory:
///
///   0        the slot of the world (transport/slot.h)
///   kArena   buffers of its rank, and slots of process sets (SharedArena)
class SharedMemory {
 public:
  static constexpr std::size_t kArena = Slot::kBytes;

  /// The memory of the host's `rank` (0 to ranks() - 1), kept alive. Throws Error(kInternal) if
  /// there is no such rank.
  SharedMemory(std::shared_ptr<const HostMemory> host, int rank);

  std::byte* at(std::size_t offset) const { return base_ + offset; }
  std::size_t size_bytes() const { return bytes_; }

  /// The slot at `offset`. Throws Error(kInternal) if none can lie there: another rank chose it.
  Slot slot(std::size_t offset) const;

  /// Commits pages to a range of the memory, or releases them. commit() throws Error(kInternal).
  void commit(std::size_t offset, std::size_t bytes) const { host_->commit(rank_, offset, bytes); }
  void release(std::size_t offset, std::size_t bytes) const noexcept {
    host_->release(rank_, offset, bytes);
  }

  /// Replaces whole pages by private ones with the same content; afterwards, discards such pages,
  /// and the shared ones below them.
  void isolate(std::size_t offset, std::size_t bytes) const noexcept {
    host_->isolate(rank_, offset, bytes);
  }
  void discard(std::size_t offset, std::size_t bytes) const noexcept {
    host_->discard(rank_, offset, bytes);
  }

  /// commit() in huge pages, until the system has no more of them; then in small ones. After an
  /// error the range has no pages.
  void commit_huge(std::size_t offset, std::size_t bytes) const;

 private:
  const std::shared_ptr<const HostMemory> host_;
  const int rank_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  mutable std::atomic<bool> has_huge_pages_{true};
};

}  // namespace torch_ring
