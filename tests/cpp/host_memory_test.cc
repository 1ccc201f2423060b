// SPDX-License-Identifier: Apache-2.0
// The memory of a host: its layout, its views, refused descriptors, and forked children.
#include "transport/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "elements.h"
#include "forked.h"
#include "memory/huge_pages.h"
#include "test_world.h"
#include "transport/shared_memory.h"
#include "transport/slot.h"

namespace torch_ring::test::host_memory_test {
namespace {

constexpr std::size_t kArenaBytes = 16u << 20;
constexpr std::size_t kPage = 4096;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

struct stat status_of(const Fd& fd) {
  struct stat status{};
  CHECK_EQ(::fstat(fd.get(), &status), 0);
  return status;
}
std::size_t size_of(const Fd& fd) { return static_cast<std::size_t>(status_of(fd).st_size); }
std::size_t committed(const Fd& fd) {
  return static_cast<std::size_t>(status_of(fd).st_blocks) * 512;
}

std::shared_ptr<const SharedMemory> view(const std::shared_ptr<const HostMemory>& host, int rank) {
  return std::make_shared<const SharedMemory>(host, rank);
}

/// A memfd like torch_ring's, with any contents; maybe sealed.
Fd foreign(std::span<const std::byte> head, std::size_t bytes, bool sealed = true) {
  Fd fd(::memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(static_cast<bool>(fd));
  CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  const std::size_t part = std::min(bytes, head.size());
  CHECK_EQ(::pwrite(fd.get(), head.data(), part, 0), static_cast<ssize_t>(part));
  if (sealed) CHECK_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  return fd;
}

/// The first page of a memory.
std::vector<std::byte> head_of(const Fd& fd) {
  std::vector<std::byte> head(kPage);
  CHECK_EQ(::pread(fd.get(), head.data(), kPage, 0), static_cast<ssize_t>(kPage));
  return head;
}

void check_refused(const Fd& fd) {
  CHECK_THROWS(HostMemory(duplicate(fd)), ErrorKind::kInternal, "not torch_ring's memory");
  CHECK_THROWS(HostMemory::read_table(fd.get()), ErrorKind::kInternal, "not torch_ring's memory");
}

TEST(host_memory_has_a_table_and_a_part_for_each_rank) {
  for (const std::size_t table_bytes : {0u, 5u, 4096u, 3u << 20}) {
    const std::string table(table_bytes, 't');
    const Fd fd = HostMemory::create(3, bytes_of(table), kArenaBytes);
    const auto host = std::make_shared<const HostMemory>(duplicate(fd));
    const HostMemory peer(duplicate(fd));
    CHECK_EQ(host->ranks(), 3);
    CHECK(std::ranges::equal(host->table(), bytes_of(table)));
    CHECK(std::ranges::equal(peer.table(), bytes_of(table)));
    CHECK(std::ranges::equal(HostMemory::read_table(fd.get()), bytes_of(table)));
    CHECK_EQ(host->size_bytes(), size_of(fd));
    CHECK_EQ(host->size_bytes(),
             huge_page_ceil(kPage + table_bytes) + 3 * (Slot::kBytes + kArenaBytes));
    CHECK((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
    for (int rank = 0; rank < 3; ++rank) {
      const auto memory = view(host, rank);
      CHECK_EQ(memory->size_bytes(), Slot::kBytes + kArenaBytes);
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(memory->at(0)) % kHugePage, std::uintptr_t{0});
      const std::size_t end = memory->size_bytes() - 1;
      for (const std::size_t at : {std::size_t{0}, end}) {
        CHECK(*memory->at(at) == std::byte{0});  // no rank writes into another's part
        *memory->at(at) = std::byte{7};
        CHECK(peer.rank_begin(rank)[at] == std::byte{7});
      }
    }
    CHECK(std::ranges::equal(peer.table(), bytes_of(table)));
  }
}

TEST(host_memory_is_address_space_until_a_rank_commits_its_part) {
  constexpr std::size_t kMachine = std::size_t{1} << 30;
  const Fd fd = HostMemory::create(
      4, bytes_of("four"), HostMemory::arena_bytes(4, kMachine, HostMemory::kMostAddressSpace));
  CHECK_EQ(committed(fd), 6 * kPage);  // header, table and a page for each rank
  const auto host = std::make_shared<const HostMemory>(duplicate(fd));
  CHECK_EQ(committed(fd), 6 * kPage);
  CHECK_EQ(host->size_bytes() - kHugePage, 4 * host->rank_bytes());
  CHECK(host->rank_bytes() > 8 * Slot::kBytes);
  const auto memory = view(host, 2);
  memory->commit(SharedMemory::kArena + 1, 2 * kPage);
  CHECK_EQ(committed(fd), 9 * kPage);
  memory->release(SharedMemory::kArena, 3 * kPage);
  CHECK_EQ(committed(fd), 6 * kPage);
}

TEST(host_memory_cannot_be_shrunk) {
  const Fd fd = HostMemory::create(1, {}, kArenaBytes);
  CHECK_EQ(::ftruncate(fd.get(), 4096), -1);
  CHECK_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);  // nor made unwritable
}

TEST(host_memory_refuses_foreign_descriptors) {
  const Fd made = HostMemory::create(2, bytes_of("table"), kArenaBytes);
  const std::vector<std::byte> head = head_of(made);
  const std::size_t bytes = size_of(made);
  HostMemory(foreign(head, bytes));  // the contents decide
  check_refused(foreign(head, bytes, false));
  check_refused(foreign(head, bytes + kHugePage));
  check_refused(foreign(head, bytes - kHugePage));
  check_refused(foreign(head, kPage));
  check_refused(foreign(head, 8));
  check_refused(foreign({}, 0));
  check_refused(foreign({}, bytes));
  check_refused(Fd(::open("/dev/null", O_RDWR | O_CLOEXEC)));
  check_refused(unix_pair().first);
  check_refused(Fd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)));
}

/// Up to 64 ranks on 2 TiB, and on machines of any other size.
TEST(host_memory_of_many_ranks_fits_the_address_space) {
  constexpr std::size_t kGiB = std::size_t{1} << 30;
  for (const std::size_t machine : {kGiB, 2048 * kGiB, 65536 * kGiB}) {
    for (const int ranks : {1, 2, 64, 4096, HostMemory::kMostRanks}) {
      const std::size_t arena =
          HostMemory::arena_bytes(ranks, machine, HostMemory::kMostAddressSpace);
      const auto count = static_cast<std::size_t>(ranks);
      const std::size_t all = count * (Slot::kBytes + arena);
      CHECK(all <= HostMemory::kMostAddressSpace);
      // A few times the machine's memory, and slots, but no more.
      CHECK(all <=
            4 * machine + count * (HostMemory::kMostSlots + 1) * Slot::kBytes + count * kHugePage);
      if (all + count * kHugePage < HostMemory::kMostAddressSpace) {
        CHECK(arena >= std::min(machine, 4 * (machine / count)));
      }
      // A sanitizer has most of the address space, and QEMU takes minutes to map as much.
      if (kSanitized || kEmulated || ranks > 4096) continue;
      const HostMemory host(HostMemory::create(ranks, {}, arena));
      CHECK_EQ(host.ranks(), ranks);
      CHECK_EQ(host.size_bytes(), all + kHugePage);
      CHECK(*host.rank_begin(ranks - 1) == std::byte{0});
    }
  }
  for (const int ranks : {-1, 0, HostMemory::kMostRanks + 1}) {
    CHECK_THROWS(HostMemory::create(ranks, {}, kHugePage), ErrorKind::kInvalidArgument,
                 "not " + std::to_string(ranks));
    CHECK_THROWS(HostMemory::least_bytes(ranks), ErrorKind::kInvalidArgument,
                 "not " + std::to_string(ranks));
  }
}

}  // namespace
}  // namespace torch_ring::test::host_memory_test
