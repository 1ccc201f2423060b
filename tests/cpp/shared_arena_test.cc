#include "transport/shared_arena.h"

#include <sys/mman.h>
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
#include <string>
#include <utility>
#include <vector>

#include "harness.h"
#include "transport/huge_pages.h"

using namespace torch_ring;

namespace {

constexpr std::size_t kHugePages = 8;

/// A rank's memory, and how a peer sees it.
struct Memory {
  Memory() : Memory(SharedMemory::create(kHugePages * kHugePage)) {}
  explicit Memory(Fd made)
      : fd(made.get()),
        peer(Fd(::dup(made.get()))),
        own(std::make_shared<const SharedMemory>(std::move(made))),
        arena(own),
        without_blocks(bytes()) {}

  std::size_t bytes() const {
    struct stat status{};
    CHECK_EQ(::fstat(fd, &status), 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  }
  /// Huge pages that have memory, for blocks.
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

bool is_filled(const unsigned char* data, std::size_t bytes, unsigned char value) {
  return std::all_of(data, data + bytes, [&](unsigned char byte) { return byte == value; });
}

/// Whether the system makes huge pages of shared memory when it is asked.
bool system_has_huge_pages() {
  const Fd fd(::memfd_create("probe", MFD_CLOEXEC));
  CHECK_EQ(::ftruncate(fd.get(), kHugePage), 0);
  std::byte* const data = map_at_huge_page(kHugePage, 0, PROT_NONE);
  CHECK(::mmap(data, kHugePage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(), 0) ==
        data);
  *data = std::byte{1};
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack
  const bool can = ::madvise(data, kHugePage, kCollapse) == 0;
  ::munmap(data, kHugePage);
  return can;
}

/// Bytes of this process's mappings of huge pages of shared memory.
std::size_t mapped_in_huge_pages() {
  std::ifstream maps("/proc/self/smaps");
  std::size_t kilobytes = 0;
  for (std::string key; maps >> key;) {
    std::size_t value = 0;
    if (key == "ShmemPmdMapped:" && maps >> value) kilobytes += value;
  }
  return kilobytes << 10;
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
  memory.arena.free(large);  // but not the huge page that another block is in
  CHECK_EQ(memory.huge_pages(), std::size_t{1});
  memory.arena.free(beside);
  CHECK_EQ(memory.huge_pages(), std::size_t{0});
}

TEST(arena_blocks_keep_their_contents_and_free_memory_goes_back) {
  Memory memory;
  std::mt19937 random(5);
  std::vector<Block> blocks;
  for (int step = 0; step < 300; ++step) {
    std::size_t used = 0;
    for (const Block& block : blocks) used += block.bytes;
    const bool is_full = used > kHugePages * kHugePage / 3;
    if (!is_full && random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % (random() % 2 == 0 ? 20'000 : 3'000'000);
      const auto value = static_cast<unsigned char>(1 + step % 255);
      auto* const data = static_cast<unsigned char*>(memory.arena.allocate(bytes));
      std::memset(data, value, bytes);
      blocks.push_back({data, bytes, value});
    } else if (!blocks.empty()) {
      const std::size_t index = random() % blocks.size();
      const Block block = blocks[index];
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(index));
      const std::int64_t offset = memory.arena.offset_of(block.data, block.bytes);
      const auto* const seen =
          reinterpret_cast<unsigned char*>(memory.peer.at(static_cast<std::size_t>(offset)));
      CHECK(is_filled(block.data, block.bytes, block.value));
      CHECK(is_filled(seen, block.bytes, block.value));
      memory.arena.free(block.data);
    }
  }
  for (const Block& block : blocks) {
    CHECK(is_filled(block.data, block.bytes, block.value));
    memory.arena.free(block.data);
  }
  CHECK_EQ(memory.huge_pages(), std::size_t{0});
  // And nothing is split for ever.
  CHECK(memory.arena.allocate(kHugePages * kHugePage) != nullptr);
}

TEST(arena_memory_is_in_huge_pages_where_the_system_can) {
  Memory memory;
  constexpr std::size_t kBytes = 3 * kHugePage;
  void* const block = memory.arena.allocate(kBytes);
  std::memset(block, 1, kBytes);
  const auto offset = static_cast<std::size_t>(memory.arena.offset_of(block, kBytes));
  std::memset(memory.peer.at(offset), 2, kBytes);
  const std::size_t by_owner_and_peer = system_has_huge_pages() ? 2 * kBytes : 0;
  CHECK_EQ(mapped_in_huge_pages(), by_owner_and_peer);
}

TEST(arena_says_when_it_is_full) {
  Memory memory;
  CHECK_THROWS(memory.arena.allocate(kHugePages * kHugePage + 1), ErrorKind::kInternal,
               "bytes of shared memory are left");
  CHECK_THROWS(memory.arena.allocate(std::numeric_limits<std::size_t>::max()), ErrorKind::kInternal,
               "bytes of shared memory are left");
  void* const all = memory.arena.allocate(kHugePages * kHugePage);
  CHECK_EQ(memory.huge_pages(), kHugePages);
  CHECK_THROWS(memory.arena.allocate(1), ErrorKind::kInternal, "1 bytes of shared memory are left");
  memory.arena.free(all);
  CHECK_EQ(memory.huge_pages(), std::size_t{0});
}
