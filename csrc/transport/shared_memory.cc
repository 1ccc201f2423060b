// SPDX-License-Identifier: Apache-2.0
#include "transport/shared_memory.h"

#include <string>
#include <utility>

#include "core/error.h"

namespace torch_ring {

SharedMemory::SharedMemory(std::shared_ptr<const HostMemory> host, int rank)
    : host_(std::move(host)), rank_(rank) {
  if (rank < 0 || rank >= host_->ranks()) {
    throw Error(ErrorKind::kInternal, "the memory of the host is for " +
                                          std::to_string(host_->ranks()) + " ranks: it has no " +
                                          std::to_string(rank));
  }
  base_ = host_->rank_begin(rank);
  bytes_ = host_->rank_bytes();
}

Slot SharedMemory::slot(std::size_t offset) const {
  const bool in_arena = offset >= kArena && offset <= bytes_ && bytes_ - offset >= Slot::kBytes;
  if (offset % kHugePage != 0 || (offset != 0 && !in_arena)) {
    throw Error(ErrorKind::kInternal, "a rank's memory of " + std::to_string(bytes_) +
                                          " bytes has no slot at offset " + std::to_string(offset));
  }
  return Slot(base_ + offset);
}

void SharedMemory::commit_huge(std::size_t offset, std::size_t bytes) const {
  try {
    if (has_huge_pages_) {
      for (std::size_t at = 0; at < bytes; at += kHugePage) {
        commit(offset + at, 1);
      }
      has_huge_pages_ = make_huge_pages(base_ + offset, bytes);
    }
    commit(offset, bytes);  // the rest of the pages
  } catch (...) {
    release(offset, bytes);
    throw;
  }
}

}  // namespace torch_ring
