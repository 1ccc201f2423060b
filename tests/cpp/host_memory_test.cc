// SPDX-License-Identifier: Apache-2.0
// The memory of a host: its layout, its views, refused descriptors, and forked children.
#include "transport/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "elements.h"
#include "emulated.h"
#include "forked.h"
#include "memory/huge_pages.h"
#include "test_world.h"
#include "transport/shared_memory.h"

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

/// Whether this process has mapped a file, or has a descriptor of it.
bool holds(ino_t file) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string range, access, offset, device, inode;
    fields >> range >> access >> offset >> device >> inode;
    if (inode == std::to_string(file) && line.find("memfd:torch_ring") != std::string::npos) {
      return true;
    }
  }
  for (int fd = 0; fd < 1024; ++fd) {
    struct stat status{};
    if (::fstat(fd, &status) == 0 && status.st_ino == file && ::fcntl(fd, F_GET_SEALS) > 0) {
      return true;
    }
  }
  return false;
}

/// A forked child that lives on must not keep the memory of its host's ranks.
TEST(host_memory_is_left_to_the_parent_by_a_forked_child) {
  if (kEmulated) return;  // QEMU shows a list of mappings of its own
  Fd made = HostMemory::create(2, bytes_of("table"), kArenaBytes);
  const ino_t file = status_of(made).st_ino;
  HostMemory host(std::move(made));
  std::byte* const own = host.rank_begin(1) + Slot::kBytes;
  host.commit(1, Slot::kBytes, kPage);
  std::memset(own, 1, kPage);
  CHECK(holds(file));
  CHECK(holds_in_child([&] {
    CHECK(holds(file));
    CHECK(own[0] == std::byte{1});
    host.leave_to_parent();
    CHECK(!holds(file));
    CHECK(is_filled(own, kPage, 0));
    std::memset(own, 2, kPage);
    CHECK(own[7] == std::byte{2});
    host.release(1, Slot::kBytes, kPage);  // nothing
    return true;
  }));
  CHECK(is_filled(own, kPage, 1));
}

TEST(host_memory_cannot_be_shrunk) {
  const Fd fd = HostMemory::create(1, {}, kArenaBytes);
  CHECK_EQ(::ftruncate(fd.get(), 4096), -1);
  CHECK_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);  // nor made unwritable
}

TEST(host_memory_views_keep_it_mapped) {
  auto host = std::make_shared<const HostMemory>(HostMemory::create(2, {}, kArenaBytes));
  const auto memory = view(host, 1);
  CHECK_THROWS(view(host, 2), ErrorKind::kInternal, "is for 2 ranks: it has no 2");
  CHECK_THROWS(view(host, -1), ErrorKind::kInternal, "is for 2 ranks: it has no -1");
  host.reset();
  std::memset(memory->at(0), 1, kPage);
  memory->commit(kPage, 1);
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

/// Every changed bit and every random number in the header is refused, or describes the same file.
TEST(host_memory_refuses_mutated_headers) {
  const Fd made = HostMemory::create(2, bytes_of("table"), kArenaBytes);
  const std::vector<std::byte> head = head_of(made);
  const std::size_t bytes = size_of(made);
  constexpr std::size_t kHeader = 32;  // the bytes of the fields
  std::size_t accepted = 0;
  const auto try_with = [&](std::span<const std::byte> mutated) {
    const Fd fd = foreign(mutated, bytes);
    try {
      const HostMemory host(duplicate(fd));
      CHECK_EQ(host.size_bytes(), bytes);
      CHECK(host.table().size() <= kHugePage);
      CHECK(host.rank_begin(host.ranks() - 1) + host.rank_bytes() ==
            host.rank_begin(0) - huge_page_ceil(kPage + host.table().size()) + bytes);
      ++accepted;
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kInternal);
      check_refused(fd);
    }
  };
  for (std::size_t bit = 0; bit < kHeader * 8; ++bit) {
    std::vector<std::byte> mutated = head;
    mutated[bit / 8] ^= std::byte{1} << (bit % 8);
    try_with(mutated);
  }
  // Only the table's length has other valid values, up to the first rank's memory.
  CHECK(accepted > 0 && accepted <= 21);
  std::mt19937_64 random(20);
  for (int i = 0; i < 500; ++i) {
    std::vector<std::byte> mutated = head;
    const std::uint64_t number = random() >> (random() % 64);
    std::memcpy(mutated.data() + 8 + random() % 3 * 8, &number, sizeof number);
    try_with(mutated);
  }
}

}  // namespace
}  // namespace torch_ring::test::host_memory_test
