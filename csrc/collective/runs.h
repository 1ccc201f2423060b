// SPDX-License-Identifier: Apache-2.0
// Runs: the entries of consecutive ranks as bytes, equal ones once. Pure: no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/board.h"

namespace torch_ring {

/// `count` consecutive ranks with equal entries.
struct EqualEntries {
  std::uint32_t count;
  ByteSpan common;
  ByteSpan own;
};

/// The entries of consecutive ranks. Their bytes lie elsewhere.
class Runs {
 public:
  Runs() = default;
  /// The entries of a round.
  explicit Runs(std::span<const Run> runs) {
    for (const Run& run : runs)
      append({static_cast<std::uint32_t>(run.count), run.common, run.own});
  }

  void clear() {
    items_.clear();
    ranks_ = 0;
  }
  /// Adds the entries of the next ranks, to the last item if they equal its entries.
  void append(const EqualEntries& entries);
  void append(const Runs& runs);

  std::span<const EqualEntries> items() const { return items_; }
  std::uint32_t ranks() const { return ranks_; }

  /// The entries of `count` ranks from `first` on.
  Runs part(std::uint32_t first, std::uint32_t count) const;

 private:
  std::vector<EqualEntries> items_;
  std::uint32_t ranks_ = 0;
};

/// Encoded runs. All items with equal common parts are one group, which has their ranks' own parts
/// if any rank has one:
///
///   group:  u32 ranks | u32 bytes of common | u64 bytes of the own parts | common | own parts
///   own:    u32 ranks | u32 bytes | the bytes
///
/// Every part is padded to a multiple of 8 bytes. The encoding is the same on every rank.
std::size_t encoded_bytes(const Runs& runs);

/// Writes the encoding to `to`, which has room for it; returns its end.
std::byte* encode(const Runs& runs, std::byte* to);

/// The most bytes of `ranks` encoded entries, each of at most `capacity` bytes.
constexpr std::size_t most_encoded_bytes(std::size_t ranks, std::size_t capacity) {
  return ranks * (3 * sizeof(std::uint64_t) + capacity);
}

/// Appends the decoded runs of exactly `ranks` ranks to `to`; they point into `bytes`. It checks
/// every size before use. Time: O(bytes). Errors: Error(kInternal) unless encode() makes such bytes
/// of entries of up to `capacity` bytes.
void decode(ByteSpan bytes, std::uint32_t ranks, std::size_t capacity, Runs& to);

/// A slot of shared memory through which one rank hands runs to others:
///
///   u64 bytes of the runs | runs
///
/// For runs that do not fit, write_slot() writes only the size, and read_slot() throws.
/// Errors of read_slot(): as those of decode().
void write_slot(std::span<std::byte> slot, const Runs& runs);
void read_slot(ByteSpan slot, std::uint32_t ranks, std::size_t capacity, Runs& to);

/// The longest entry such that `ranks` different ones fit a slot.
constexpr std::size_t safe_capacity(std::size_t slot_bytes, std::size_t ranks) {
  const std::size_t share = (slot_bytes - sizeof(std::uint64_t)) / ranks;
  const std::size_t overhead = most_encoded_bytes(1, 0);
  return share < overhead ? 0 : (share - overhead) / 8 * 8;
}

/// The entries of a round, by rank.
class RoundEntries {
 public:
  /// Takes the entries of all ranks, in the order of `ranks`; or in ascending order if it is empty.
  void assign(const Runs& runs, std::span<const int> ranks = {});

  std::span<const Run> runs() const { return runs_; }

 private:
  std::vector<Run> runs_;
};

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace torch_ring
