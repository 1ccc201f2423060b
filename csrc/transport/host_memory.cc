// SPDX-License-Identifier: Apache-2.0
#include "transport/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>

#include "core/error.h"
#include "memory/huge_pages.h"
#include "transport/slot.h"

namespace torch_ring {

namespace {

constexpr std::size_t kTable = 4096;  // where the table begins

/// The beginning of the first page.
struct Header {
  static constexpr std::uint64_t kMagic = 0x676e69725f686374;  // "tch_ring"
  static constexpr std::uint32_t kVersion = 1;

  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t ranks;
  std::uint64_t stride;
  std::uint64_t table_bytes;
};

/// The offset of the first rank's memory.
constexpr std::size_t first_rank(std::size_t table_bytes) {
  return huge_page_ceil(kTable + table_bytes);
}

/// Writes `bytes` to the file; the system finds pages for them or says that it has none.
void write_all(int fd, std::size_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto written = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw_errno("write to the memory of the host");
    offset += static_cast<std::size_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

/// Fills `bytes` from the file; returns whether the file has so many.
bool read_all(int fd, std::size_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const auto got = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    offset += static_cast<std::size_t>(got);
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

void commit_pages(int fd, std::size_t offset, std::size_t bytes) {
  constexpr std::size_t kAtOnce = 256u << 10;  // bytes: a call that a signal interrupts is undone
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = std::min(kAtOnce, bytes - done);
    const int error =
        ::posix_fallocate(fd, static_cast<off_t>(offset + done), static_cast<off_t>(part));
    if (error == EINTR) continue;
    if (error != 0) {
      errno = error;
      throw_errno("cannot get " + std::to_string(bytes) +
                  " bytes of shared memory: posix_fallocate");
    }
    done += part;
  }
}

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorKind::kInternal,
              "a descriptor of the host is not torch_ring's memory: it " + why);
}

/// The header, read once, so that a later change by another process has no effect here. Checks that
/// its numbers add up to the size of the file, which cannot shrink.
Header checked_header(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) refuse("is not sealed");
  struct stat status{};
  if (::fstat(fd, &status) != 0) throw_errno("fstat");
  const auto bytes = static_cast<std::size_t>(status.st_size);

  Header header{};
  if (!read_all(fd, 0, std::as_writable_bytes(std::span(&header, 1)))) refuse("is too short");
  if (header.magic != Header::kMagic) refuse("begins with something else");
  if (header.version != Header::kVersion) {
    refuse("has version " + std::to_string(header.version) + ", not " +
           std::to_string(Header::kVersion));
  }
  // In this order no sum or product can overflow: each number is known to be at most `bytes`.
  const bool adds_up = header.ranks >= 1 && header.ranks <= HostMemory::kMostRanks &&
                       header.table_bytes <= bytes && header.stride >= Slot::kBytes &&
                       header.stride % kHugePage == 0 && header.stride <= bytes / header.ranks &&
                       first_rank(header.table_bytes) + header.ranks * header.stride == bytes;
  if (!adds_up) refuse("is not as long as its header says");
  return header;
}

}  // namespace

std::size_t HostMemory::least_bytes(int ranks) {
  if (ranks < 1 || ranks > kMostRanks) {
    throw Error(ErrorKind::kInvalidArgument, "a host has 1 to " + std::to_string(kMostRanks) +
                                                 " ranks, not " + std::to_string(ranks));
  }
  return static_cast<std::size_t>(ranks) * (Slot::kBytes + kHugePage);
}

std::size_t HostMemory::arena_bytes(int ranks, std::size_t machine_bytes, std::size_t most_bytes) {
  if (most_bytes < least_bytes(ranks)) {
    throw Error(ErrorKind::kInternal, std::to_string(most_bytes) +
                                          " bytes of address space are too few for the memory of " +
                                          std::to_string(ranks) + " ranks");
  }
  const auto count = static_cast<std::size_t>(ranks);
  const std::size_t buffers = std::min(machine_bytes, machine_bytes / count * 4);
  return std::min(huge_page_ceil(buffers + kMostSlots * Slot::kBytes),
                  huge_page_floor(most_bytes / count) - Slot::kBytes);
}

std::size_t HostMemory::mappable_bytes() noexcept {
  for (std::size_t bytes = kMostAddressSpace; bytes >= kHugePage; bytes /= 2) {
    void* const all =
        ::mmap(nullptr, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) continue;
    ::munmap(all, 2 * bytes);
    return bytes;
  }
  return 0;
}

std::size_t HostMemory::machine_bytes() noexcept {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

Fd HostMemory::create(int ranks, std::span<const std::byte> table, std::size_t arena_bytes) {
  static_cast<void>(least_bytes(ranks));  // checks their number
  Fd fd(::memfd_create("torch_ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("memfd_create");
  const std::size_t stride = huge_page_ceil(Slot::kBytes + arena_bytes);
  const std::size_t first = first_rank(table.size());
  const std::size_t bytes = first + static_cast<std::size_t>(ranks) * stride;
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw_errno("ftruncate");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) throw_errno("F_ADD_SEALS");
  const Header header{Header::kMagic, Header::kVersion, static_cast<std::uint32_t>(ranks), stride,
                      table.size()};
  write_all(fd.get(), 0, std::as_bytes(std::span(&header, 1)));
  write_all(fd.get(), kTable, table);
  for (std::size_t at = first; at < bytes; at += stride) {
    commit_pages(fd.get(), at, Slot::kHeaderBytes);
  }
  return fd;
}

std::vector<std::byte> HostMemory::read_table(int fd) {
  std::vector<std::byte> table(checked_header(fd).table_bytes);
  if (!read_all(fd, kTable, table)) refuse("is too short");
  return table;
}

HostMemory::HostMemory(Fd fd) : fd_(std::move(fd)) {
  const Header header = checked_header(fd_.get());
  ranks_ = static_cast<int>(header.ranks);
  table_bytes_ = header.table_bytes;
  first_rank_ = first_rank(header.table_bytes);
  stride_ = header.stride;
  bytes_ = first_rank_ + header.ranks * header.stride;
  base_ = map_at_huge_page(bytes_, 0, PROT_NONE);
  if (base_ == nullptr) {
    throw_errno("cannot map the " + std::to_string(bytes_ >> 20) +
                " MiB of this host's shared memory (`ulimit -v`): mmap");
  }
  if (::mmap(base_, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
             fd_.get(), 0) != base_) {
    const int error = errno;
    ::munmap(base_, bytes_);
    errno = error;
    throw_errno("mmap of a memfd");
  }
  ::madvise(base_, bytes_, MADV_DONTDUMP);
}

HostMemory::~HostMemory() { ::munmap(base_, bytes_); }

void HostMemory::leave_to_parent() noexcept {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  // A system that does not overcommit (vm.overcommit_memory=2) refuses so large a writable mapping,
  // but allows a read-only one.
  if (::mmap(base_, bytes_, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) {
    ::mmap(base_, bytes_, PROT_READ, kFlags, -1, 0);
  }
  fd_.reset();
}

std::span<const std::byte> HostMemory::table() const { return {base_ + kTable, table_bytes_}; }

std::size_t HostMemory::offset_of_rank(int rank) const {
  return first_rank_ + static_cast<std::size_t>(rank) * stride_;
}

void HostMemory::commit(int rank, std::size_t offset, std::size_t bytes) const {
  commit_pages(fd_.get(), offset_of_rank(rank) + offset, bytes);
}

void HostMemory::release(int rank, std::size_t offset, std::size_t bytes) const noexcept {
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(offset_of_rank(rank) + offset), static_cast<off_t>(bytes));
}

void HostMemory::isolate(int rank, std::size_t offset, std::size_t bytes) const noexcept {
  const std::size_t begin = offset_of_rank(rank) + offset;
  std::byte* const data = base_ + begin;
  if (::mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
             fd_.get(), static_cast<off_t>(begin)) != data) {
    return;
  }
  ::madvise(data, bytes, MADV_DONTDUMP);
  // A page is copied when it is first written to, and shows the shared one until then.
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
  if (::madvise(data, bytes, kPopulateWrite) != 0) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    for (std::size_t at = 0; at < bytes; at += page) {
      // Atomic: another thread may be writing here.
      __atomic_fetch_add(reinterpret_cast<volatile unsigned char*>(data + at), 0, __ATOMIC_RELAXED);
    }
  }
  release(rank, offset, bytes);
}

void HostMemory::discard(int rank, std::size_t offset, std::size_t bytes) const noexcept {
  ::madvise(base_ + offset_of_rank(rank) + offset, bytes, MADV_DONTNEED);
  release(rank, offset, bytes);
}

}  // namespace torch_ring
