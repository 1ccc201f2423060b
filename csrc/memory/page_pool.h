// PagePool: private memory for large tensors that come and go.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>

namespace torch_ring {

/// Blocks of large private memory. One that is given back is kept for the next that wants about as
/// much: to get new pages takes longer than to fill them. The system may take the kept ones
/// when it is short of memory (MADV_FREE).
///
/// A forked child inherits the blocks in use as it does all private memory, and may give them back;
/// what is kept is empty there (MADV_WIPEONFORK), so that neither copies what nobody reads.
/// Thread: any. Blocking: no, and it waits for no other thread: who comes while another one is here
/// gets new memory.
class PagePool {
 public:
  /// Keeps at most so many bytes.
  explicit PagePool(std::size_t most_bytes) : most_bytes_(most_bytes) {}
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  /// A block of `bytes` (more than 0) or up to a quarter more, rounded up to whole huge pages,
  /// aligned to them. Null where the system has no more.
  void* take(std::size_t bytes) noexcept;

  /// Takes a block back; the least recent ones go when it is too much.
  void give_back(void* data) noexcept;

  /// Keeps at most so many bytes from now on; from the next give_back() on if another thread is
  /// here.
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
  std::mutex mutex_;         // guards what follows
  Block* newest_ = nullptr;  // of those that are kept
};

}  // namespace torch_ring
