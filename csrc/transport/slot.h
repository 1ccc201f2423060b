// SPDX-License-Identifier: Apache-2.0
// Slot: the part of a rank's memory that one communicator uses.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "memory/huge_pages.h"
#include "transport/doorbell.h"

namespace torch_ring {

/// The counters of one rank, which its peers poll, and the word of its doorbell. Zeros at first.
struct SegmentHeader {
  // Each counter has a cache line of its own: only its rank writes it, and the others poll it.
  alignas(64) std::atomic<std::uint64_t> posted;     // board rounds this rank has posted to
  alignas(64) std::atomic<std::uint64_t> published;  // world rounds written to kWorldEntries
  std::atomic<std::int32_t> last_of_previous;        // Round::last_of_previous there
  std::atomic<std::uint32_t> most_us;                // Round::most_us there
  alignas(64) std::atomic<std::uint64_t> staged;     // segments this rank has made readable
  alignas(64) std::atomic<std::uint64_t> reduced;    // segments with this rank's part reduced
  alignas(64) std::atomic<std::uint64_t> barriers;   // barriers this rank has reached
  alignas(64) Doorbell::Word doorbell;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(SegmentHeader) <= 4096);

/// The map of a slot. The world's slot is the beginning of every rank's memory; that of a process
/// set lies in the arena of each of its ranks (SharedArena::reserve), at any offset.
///
///   offset            contents                  written by
///   0                 SegmentHeader             its rank (the doorbell: by all)
///   kEntries          2 x kEntrySlotBytes       its rank: its entries of this and the last round
///   kWorldEntries     2 x kWorldSlotBytes       the host's leader: the entries of all hosts
///   kStaging          kSegments x kSegmentBytes its rank; the sums by the ranks that reduce them
///   kRounds           kRoundBytes               its rank and the ranks that reduce in place: the
///                                               rounds of a private tensor, among several hosts
///
/// The header's page is there from the start. A rank commits each other part of its own slot
/// together with the object that uses it, so that a lack of memory is an error there and no SIGBUS
/// later.
class Slot {
 public:
  static constexpr std::size_t kEntryBytes = 64u << 10;  // the largest entry of a board
  static constexpr std::size_t kEntrySlotBytes = kEntryBytes + 64;
  static constexpr std::size_t kWorldSlotBytes = 4u << 20;
  // Measured (docs/internals/measurements.md).
  static constexpr std::size_t kSegmentBytes = 256u << 10;
  static constexpr std::size_t kSegments = 6;
  // Large enough to hide the latency of ring steps, small enough to stay in a last-level cache.
  static constexpr std::size_t kRoundBytes = 8u << 20;

  static constexpr std::size_t kHeaderBytes = 4096;
  static constexpr std::size_t kEntries = kHeaderBytes;
  static constexpr std::size_t kWorldEntries = 1u << 20;
  static constexpr std::size_t kStaging = kWorldEntries + 2 * kWorldSlotBytes;
  static constexpr std::size_t kRounds = huge_page_ceil(kStaging + kSegments * kSegmentBytes);
  static constexpr std::size_t kBytes = huge_page_ceil(kRounds + kRoundBytes);

  /// The slot at `base`, which must outlive it: SharedMemory::slot() makes it.
  explicit Slot(std::byte* base) : base_(base) {}

  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  std::byte* entry(std::uint64_t round) const {
    return base_ + kEntries + round % 2 * kEntrySlotBytes;
  }
  std::byte* world_entries(std::uint64_t round) const {
    return base_ + kWorldEntries + round % 2 * kWorldSlotBytes;
  }
  std::byte* segment(std::uint64_t number) const {
    return base_ + kStaging + number % kSegments * kSegmentBytes;
  }
  std::byte* rounds() const { return base_ + kRounds; }

 private:
  std::byte* base_;
};

static_assert(Slot::kEntries + 2 * Slot::kEntrySlotBytes <= Slot::kWorldEntries);

}  // namespace torch_ring
