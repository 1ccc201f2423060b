// SharedMemory: a rank's memory, which the other ranks of its host read and write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/fd.h"
#include "memory/huge_pages.h"

namespace torch_ring {

/// The map of one rank's memory (a memfd, so nothing stays behind in /dev/shm):
///
///   offset            contents                  written by
///   0                 SegmentHeader             its rank (`asleep`: read by all)
///   kEntries          2 x kEntrySlotBytes       its rank: its entries of this and the last round
///   kWorldEntries     2 x kWorldSlotBytes       the host's leader: the entries of all hosts
///   kStaging          kSegments x kSegmentBytes its rank; the sums by the ranks that reduce them
///   kArena            the rest                  its rank and the ranks that reduce in place
///
/// create() commits all but the arena and the world entries, so that a machine without memory gives
/// an error there and no SIGBUS later. Those two are committed when they are first used.
struct SegmentHeader {
  // Each counter has a cache line of its own: only its rank writes it, and the others poll it.
  alignas(64) std::atomic<std::uint64_t> posted;     // board rounds this rank has posted to
  alignas(64) std::atomic<std::uint64_t> published;  // world rounds written to kWorldEntries
  alignas(64) std::atomic<std::uint64_t> staged;     // segments this rank has made readable
  alignas(64) std::atomic<std::uint64_t> reduced;    // segments with this rank's part reduced
  alignas(64) std::atomic<std::uint64_t> barriers;   // barriers this rank has reached
  alignas(64) std::atomic<std::uint32_t> asleep;     // Doorbell's flag
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(SegmentHeader) <= 4096);

class SharedMemory {
 public:
  static constexpr std::size_t kEntryBytes = 64u << 10;  // the largest entry of a board
  static constexpr std::size_t kEntrySlotBytes = kEntryBytes + 64;
  static constexpr std::size_t kWorldSlotBytes = 4u << 20;
  // Measured (docs/tuning.md).
  static constexpr std::size_t kSegmentBytes = 256u << 10;
  static constexpr std::size_t kSegments = 6;

  static constexpr std::size_t kEntries = 4096;
  static constexpr std::size_t kWorldEntries = 1u << 20;
  static constexpr std::size_t kStaging = kWorldEntries + 2 * kWorldSlotBytes;
  static constexpr std::size_t kArena = huge_page_ceil(kStaging + kSegments * kSegmentBytes);

  /// A new memfd with `arena_bytes` of arena (address space only); 0: the size of the host's
  /// memory. Throws Error(kInternal).
  static Fd create(std::size_t arena_bytes = 0);

  /// Maps the memory behind `fd`, this rank's or a peer's. Throws Error(kInternal), also for a
  /// descriptor that create() has not made.
  explicit SharedMemory(Fd fd);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  std::byte* at(std::size_t offset) const { return base_ + offset; }
  std::size_t size_bytes() const { return bytes_; }

  /// Commits pages to a range of the memory, or releases them. commit() throws Error(kInternal).
  void commit(std::size_t offset, std::size_t bytes) const;
  void release(std::size_t offset, std::size_t bytes) const noexcept;

  /// commit() in huge pages, until the system has no more of them; then in small ones. After an
  /// error the range has no pages.
  void commit_huge(std::size_t offset, std::size_t bytes) const;

 private:
  Fd fd_;
  mutable std::atomic<bool> has_huge_pages_{true};
  std::size_t bytes_ = 0;
  std::byte* base_ = nullptr;
};

static_assert(SharedMemory::kEntries + 2 * SharedMemory::kEntrySlotBytes <=
              SharedMemory::kWorldEntries);

}  // namespace torch_ring
