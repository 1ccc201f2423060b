// Private memory for large tensors that come and go.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace torch_ring {

/// Blocks of large private memory. One that is given back is kept for the next that wants about as
/// much: to get new pages takes longer than to fill them. Whatever is kept, the system may take
/// when it is short of memory (MADV_FREE).
///
/// A forked child inherits blocks as it does all private memory, and may give them back.
/// Thread: any. Blocking: no, and it waits for no other thread: who comes while another one is here
/// gets new memory.
class KeptPages {
 public:
  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  /// Keeps at most so many bytes.
  explicit KeptPages(std::size_t most_bytes);
  ~KeptPages();
  KeptPages(const KeptPages&) = delete;
  KeptPages& operator=(const KeptPages&) = delete;

  /// A block of `bytes` (more than 0) or up to a quarter more, rounded up to whole huge pages,
  /// aligned to them. Its `data` is null where the system has no more.
  Block take(std::size_t bytes) noexcept;

  /// Takes a block back; the least recent ones go when it is too much.
  void give_back(Block block) noexcept;

  std::size_t kept_bytes() const;

 private:
  Block kept(std::size_t bytes) noexcept;

  const std::size_t most_bytes_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Block> kept_;   // the most recent last
  std::size_t kept_bytes_ = 0;
};

}  // namespace torch_ring
