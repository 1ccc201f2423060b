// SPDX-License-Identifier: Apache-2.0
#include "transport/shared_arena.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "elements.h"
#include "emulated.h"
#include "harness.h"
#include "memory/huge_pages.h"

namespace torch_ring::test::shared_arena_test {

namespace {

constexpr std::size_t kHugePages = 8;

/// A rank's memory, and a peer's mapping of it.
struct Memory {
  Memory() : Memory(HostMemory::create(1, {}, kHugePages * kHugePage)) {}
  explicit Memory(Fd made)
      : fd(made.get()),
        peer(std::make_shared<const HostMemory>(Fd(::dup(made.get()))), 0),
        own(std::make_shared<const SharedMemory>(
            std::make_shared<const HostMemory>(std::move(made)), 0)),
        arena(own),
        without_blocks(bytes()) {}

  std::size_t bytes() const {
    struct stat status{};
    CHECK_EQ(::fstat(fd, &status), 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  }
  /// The number of huge pages committed for blocks.
  std::size_t huge_pages() const {
    CHECK_EQ((bytes() - without_blocks) % kHugePage, std::size_t{0});
    return (bytes() - without_blocks) / kHugePage;
  }

  const int fd;
  const SharedMemory peer;
  const std::shared_ptr<const SharedMemory> own;
  SharedArena arena;
  const std::size_t without_blocks;
};

struct Block {
  unsigned char* data;
  std::size_t bytes;
  unsigned char value;
};

/// The number of huge pages in which a block lies.
std::size_t huge_pages_of(const std::vector<Block>& blocks) {
  std::set<std::uintptr_t> pages;
  for (const Block& block : blocks) {
    const auto begin = reinterpret_cast<std::uintptr_t>(block.data);
    for (auto page = begin / kHugePage; page <= (begin + block.bytes - 1) / kHugePage; ++page) {
      pages.insert(page);
    }
  }
  return pages.size();
}

/// Bytes of shared memory that this process has mapped in huge pages.
std::size_t mapped_in_huge_pages() {
  std::ifstream maps("/proc/self/smaps");
  std::size_t kilobytes = 0;
  for (std::string key; maps >> key;) {
    std::size_t value = 0;
    if (key == "ShmemPmdMapped:" && maps >> value) kilobytes += value;
  }
  return kilobytes << 10;
}

/// Whether the system now has huge pages for `bytes` of shared memory.
bool system_has_huge_pages(std::size_t bytes) {
  const Fd fd(::memfd_create("probe", MFD_CLOEXEC));
  CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  std::byte* const data = map_at_huge_page(bytes, 0, PROT_NONE);
  CHECK(::mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(), 0) == data);
  std::memset(data, 1, bytes);
  const std::size_t before = mapped_in_huge_pages();
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack
  const bool done = ::madvise(data, bytes, kCollapse) == 0;
  std::memset(data, 1, bytes);
  const bool can = done && mapped_in_huge_pages() == before + bytes;
  ::munmap(data, bytes);
  return can;
}

/// While this lives, the process gets no huge pages.
struct NoHugePages {
  NoHugePages() { CHECK_EQ(::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0); }
  ~NoHugePages() { ::prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0); }
};

/// Allocates and frees at random; checks the committed pages and their contents.
void use_at_random() {
  Memory memory;
  std::mt19937 random(5);
  std::vector<Block> blocks;
  const auto allocate = [&](unsigned char value) {
    const bool is_small = random() % 2 == 0;
    const std::size_t bytes = 1 + random() % (is_small ? 20'000 : 3'000'000);
    auto* const data = static_cast<unsigned char*>(memory.arena.allocate(bytes));
    blocks.push_back({data, bytes, value});
    CHECK_EQ(memory.huge_pages(), huge_pages_of(blocks));  // before the first access
    std::memset(data, value, bytes);
  };
  const auto free = [&](std::size_t index) {
    const Block block = blocks[index];
    const std::int64_t offset = memory.arena.offset_of(block.data, block.bytes);
    const auto* const seen =
        reinterpret_cast<unsigned char*>(memory.peer.at(static_cast<std::size_t>(offset)));
    CHECK(is_filled(block.data, block.bytes, block.value));
    CHECK(is_filled(seen, block.bytes, block.value));
    blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(index));
    memory.arena.free(block.data);
    CHECK_EQ(memory.huge_pages(), huge_pages_of(blocks));
  };
  for (int step = 0; step < 300; ++step) {
    std::size_t used = 0;
    for (const Block& block : blocks) used += block.bytes;
    if (used < kHugePages * kHugePage / 4 && random() % 2 == 0) {
      allocate(static_cast<unsigned char>(step));
    } else if (!blocks.empty()) {
      free(random() % blocks.size());
    }
  }
  while (!blocks.empty()) free(0);
  memory.arena.allocate(kHugePages * kHugePage);  // free ranges have joined again
}

}  // namespace

TEST(arena_blocks_share_huge_pages) {
  Memory memory;
  void* const first = memory.arena.allocate(1);
  CHECK_EQ(memory.huge_pages(), std::size_t{1});
  void* const rest = memory.arena.allocate(kHugePage - 4096);
  CHECK_EQ(memory.huge_pages(), std::size_t{1});
  void* const large = memory.arena.allocate(2 * kHugePage + 1);
  CHECK_EQ(memory.huge_pages(), std::size_t{4});
  void* const beside = memory.arena.allocate(4096);
  CHECK_EQ(memory.huge_pages(), std::size_t{4});
  memory.arena.free(first);
  CHECK_EQ(memory.huge_pages(), std::size_t{4});
  memory.arena.free(rest);
  CHECK_EQ(memory.huge_pages(), std::size_t{3});
  memory.arena.free(large);  // keeps the huge page of `beside`
  CHECK_EQ(memory.huge_pages(), std::size_t{1});
  memory.arena.free(beside);
  CHECK_EQ(memory.huge_pages(), std::size_t{0});
}

TEST(arena_commits_only_the_huge_pages_of_its_blocks) { use_at_random(); }

TEST(arena_knows_what_it_has_given) {
  Memory memory;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  CHECK_EQ(memory.arena.used_bytes(), std::size_t{0});
  void* const first = memory.arena.allocate(1);
  void* const second = memory.arena.allocate(3 * page - 1);
  CHECK_EQ(memory.arena.used_bytes(), 4 * page);
  memory.arena.free(first);
  CHECK_EQ(memory.arena.used_bytes(), 3 * page);
  memory.arena.free(second);
  CHECK_EQ(memory.arena.used_bytes(), std::size_t{0});
}

TEST(arena_works_without_huge_pages) {
  if (test::kEmulated) return;  // QEMU does not pass such a call on
  const NoHugePages none;
  use_at_random();
  Memory memory;
  std::memset(memory.arena.allocate(2 * kHugePage), 1, 2 * kHugePage);
  CHECK_EQ(mapped_in_huge_pages(), std::size_t{0});
}

TEST(arena_memory_is_in_huge_pages_where_available) {
  constexpr std::size_t kBytes = 3 * kHugePage;
  if (!system_has_huge_pages(2 * kBytes)) return;
  Memory memory;
  void* const block = memory.arena.allocate(kBytes);
  std::memset(block, 1, kBytes);
  const auto offset = static_cast<std::size_t>(memory.arena.offset_of(block, kBytes));
  std::memset(memory.peer.at(offset), 2, kBytes);
  const std::size_t huge = mapped_in_huge_pages();
  if (!system_has_huge_pages(2 * kBytes)) return;  // another program took them
  CHECK_EQ(huge, 2 * kBytes);                      // the owner's and the peer's mapping
}

TEST(arena_isolates_memory_from_its_peers) {
  if (test::kEmulated) return;  // QEMU says that it has done MADV_POPULATE_WRITE, and has not
  Memory memory;
  constexpr std::size_t kBytes = 5 * 4096;
  auto* const neighbour = static_cast<unsigned char*>(memory.arena.allocate(4096));
  auto* const mine = static_cast<unsigned char*>(memory.arena.allocate(kBytes));
  std::memset(neighbour, 1, 4096);
  std::memset(mine, 2, kBytes);
  const auto at_peer = [&](const void* data) {
    return memory.peer.at(static_cast<std::size_t>(memory.arena.offset_of(data, 1)));
  };
  std::byte* const theirs = at_peer(mine);
  std::byte* const theirs_of_neighbour = at_peer(neighbour);
  memory.arena.isolate(mine + 4096, 3 * 4096);
  CHECK(is_filled(mine, kBytes, 2));
  std::memset(theirs, 3, kBytes);
  std::memset(theirs_of_neighbour, 3, 4096);
  CHECK(is_filled(neighbour, 4096, 3));
  CHECK(is_filled(mine, 4096, 3));  // not isolated
  CHECK(is_filled(mine + 4096, 3 * 4096, 2));
  CHECK(is_filled(mine + 4 * 4096, 4096, 3));
  std::memset(mine + 4096, 4, 3 * 4096);
  CHECK(static_cast<unsigned char>(theirs[4096]) == 3);

  CHECK_EQ(memory.arena.offset_of(mine, kBytes), -1);
  CHECK_EQ(memory.arena.offset_of(mine + 4096, 1), -1);
  CHECK(memory.arena.offset_of(mine, 4096) >= 0);
  CHECK(memory.arena.offset_of(neighbour, 4096) >= 0);

  memory.arena.free(mine);  // no later allocation gets its place
  for (int i = 0; i < 100; ++i) {
    auto* const later = static_cast<unsigned char*>(memory.arena.allocate(4096));
    CHECK(later + 4096 <= mine || later >= mine + kBytes);
    CHECK(memory.arena.offset_of(later, 4096) >= 0);
  }
}

TEST(arena_isolates_only_its_own_memory) {
  Memory memory;
  std::vector<unsigned char> elsewhere(4096, 7);
  memory.arena.isolate(elsewhere.data(), elsewhere.size());
  CHECK(is_filled(elsewhere.data(), elsewhere.size(), 7));
}

TEST(arena_gives_nothing_when_full) {
  Memory memory;
  CHECK(memory.arena.allocate(kHugePages * kHugePage + 1) == nullptr);
  CHECK(memory.arena.allocate(std::numeric_limits<std::size_t>::max()) == nullptr);
  void* const all = memory.arena.allocate(kHugePages * kHugePage);
  CHECK_EQ(memory.huge_pages(), kHugePages);
  CHECK(memory.arena.allocate(1) == nullptr);
  memory.arena.free(all);
  CHECK_EQ(memory.huge_pages(), std::size_t{0});
}

}  // namespace torch_ring::test::shared_arena_test
