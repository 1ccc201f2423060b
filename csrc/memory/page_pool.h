// SPDX-License-Identifier: Apache-2.0
// PagePool: private memory for large, short-lived tensors.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>

namespace torch_ring {

/// Large blocks of private memory. The pool keeps a returned block for the next request of about
/// its size, because new pages cost more time than filling them. The system may reclaim kept blocks
/// when it is short of memory (MADV_FREE).
///
/// A forked child inherits the blocks in use like all private memory, and may return them. Kept
/// blocks are empty there (MADV_WIPEONFORK), so that neither process copies pages that nobody
/// reads.
/// Thread: any. Blocking: no, not even for another thread: a thread that finds the pool locked gets
/// new memory.
class PagePool {
 public:
  /// Keeps at most `most_bytes`.
  explicit PagePool(std::size_t most_bytes) : most_bytes_(most_bytes) {}
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  /// A block of `bytes` (more than 0) or up to a quarter more, in whole huge pages and aligned to
  /// them. Null if the system has no memory left.
  void* take(std::size_t bytes) noexcept;

  /// Returns a block to the pool, which frees its oldest blocks if it keeps too much.
  void give_back(void* data) noexcept;

  /// Keeps at most `most_bytes` from now on, or from the next give_back() on if another thread
  /// holds the pool.
  void limit(std::size_t most_bytes) noexcept;

  std::size_t kept_bytes() const { return kept_bytes_; }

  /// The size of a block.
  static std::size_t bytes_of(const void* data);

 private:
  struct Block;

  Block* take_kept(std::size_t bytes) noexcept;
  void drop_oldest_until(std::size_t most_bytes) noexcept;

  std::atomic<std::size_t> most_bytes_;
  std::atomic<std::size_t> kept_bytes_ = 0;
  std::mutex mutex_;         // guards the members below
  Block* newest_ = nullptr;  // of the kept blocks
};

}  // namespace torch_ring
