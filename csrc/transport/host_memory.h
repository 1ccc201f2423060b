// SPDX-License-Identifier: Apache-2.0
// HostMemory: the memory of a host, mapped by all of its ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/fd.h"

namespace torch_ring {

/// A memfd, so nothing stays behind in /dev/shm. One rank of the host makes it and passes it to the
/// others:
///
///   offset                  contents
///   0                       a page: magic, version, and the numbers below
///   4096                    the table: any bytes, from the maker to the others
///   first_rank              a rank's memory (SharedMemory), `stride` bytes
///   first_rank + stride     the next rank's, and so on
///
/// Only the header, the table and the first page of each rank's memory are committed at first,
/// since its peers may read that page before the rank does. The rest is address space. `first_rank`
/// and `stride` are whole huge pages.
///
/// Thread: any. Blocking: while the system looks for memory.
class HostMemory {
 public:
  /// A new memfd for `ranks` ranks (at most kMostRanks). It cannot be shrunk: its readers would get
  /// SIGBUS. `arena_bytes`: the arena of each rank, for buffers and slots of process sets, rounded
  /// up to huge pages. Errors: Error(kInvalidArgument), Error(kInternal).
  static Fd create(int ranks, std::span<const std::byte> table, std::size_t arena_bytes);

  /// The bytes of each rank's arena on a machine with `machine_bytes` of memory: all of that, but
  /// at most four times a rank's share of it, and kMostSlots slots; less if the memory of all ranks
  /// would exceed `most_bytes`. Errors: Error(kInternal) if `most_bytes` are below least_bytes().
  static std::size_t arena_bytes(int ranks, std::size_t machine_bytes, std::size_t most_bytes);

  /// The least bytes with which ranks share memory: a slot for each, and one huge page.
  static std::size_t least_bytes(int ranks);

  /// The address space that this process can spare: about half of the space that it may still map,
  /// so that the program keeps the rest; at most kMostAddressSpace.
  static std::size_t mappable_bytes() noexcept;

  /// The memory of this machine.
  static std::size_t machine_bytes() noexcept;

  /// The table behind `fd`, without mapping the memory; `fd` stays the caller's. Errors: as the
  /// constructor's.
  static std::vector<std::byte> read_table(int fd);

  /// Maps all of the memory behind `fd`. Errors: Error(kInternal), also for a descriptor not made
  /// by create(), since another process sent it.
  explicit HostMemory(Fd fd);

  /// In a forked child: unmaps the parent's memory, which would otherwise live as long as the
  /// child. From then on its addresses read as zeros, and writes are the child's own.
  void leave_to_parent() noexcept;
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  int ranks() const { return ranks_; }
  std::span<const std::byte> table() const;

  std::byte* rank_begin(int rank) const { return base_ + offset_of_rank(rank); }
  std::size_t rank_bytes() const { return stride_; }
  std::size_t size_bytes() const { return bytes_; }

  /// Commits pages to a range of a rank's memory, or releases them. commit() throws
  /// Error(kInternal).
  void commit(int rank, std::size_t offset, std::size_t bytes) const;
  void release(int rank, std::size_t offset, std::size_t bytes) const noexcept;

  /// Maps private pages in place of whole shared ones, with the same content, and releases these.
  /// No write of another thread gets lost. Does nothing if the system has no memory.
  void isolate(int rank, std::size_t offset, std::size_t bytes) const noexcept;
  /// Releases pages of which isolate() has made some private.
  void discard(int rank, std::size_t offset, std::size_t bytes) const noexcept;

  static constexpr int kMostRanks = 1 << 16;
  static constexpr std::size_t kMostSlots = 1024;  // of process sets, beside the buffers
  static constexpr std::size_t kMostAddressSpace = std::size_t{1} << 45;  // a quarter of x86-64's

 private:
  std::size_t offset_of_rank(int rank) const;

  Fd fd_;
  int ranks_ = 0;
  std::size_t table_bytes_ = 0;
  std::size_t first_rank_ = 0;
  std::size_t stride_ = 0;
  std::size_t bytes_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace torch_ring
