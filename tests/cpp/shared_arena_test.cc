// SPDX-License-Identifier: Apache-2.0
#include "transport/shared_arena.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "elements.h"
#include "harness.h"
#include "memory/huge_pages.h"
#include "test_world.h"
#include "transport/shared_memory.h"
#include "transport/slot.h"

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

TEST(arena_commits_only_the_huge_pages_of_its_blocks) { use_at_random(); }

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

std::size_t committed(const Fd& fd) {
  struct stat status{};
  CHECK_EQ(::fstat(fd.get(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

TEST(slots_are_reserved_without_memory_and_read_as_zeros_again) {
  const Fd fd = HostMemory::create(1, {}, 4 * Slot::kBytes);
  const auto host = std::make_shared<const HostMemory>(duplicate(fd));
  const auto memory = std::make_shared<const SharedMemory>(host, 0);
  SharedArena arena(memory);
  const std::size_t before = committed(fd);
  std::vector<std::size_t> slots;
  for (std::size_t i = 1; i <= 4; ++i) {
    slots.push_back(arena.reserve());
    CHECK_EQ(committed(fd), before + i * Slot::kHeaderBytes);
    static_cast<void>(memory->slot(slots.back()));  // it is valid
  }
  CHECK_THROWS(arena.reserve(), ErrorKind::kInternal, "another set of ranks");
  CHECK(arena.allocate(1) == nullptr);

  std::ranges::sort(slots);
  for (std::size_t i = 1; i < 4; ++i) CHECK_EQ(slots[i] - slots[i - 1], Slot::kBytes);
  std::memset(memory->at(slots[1]), 1, Slot::kBytes);
  std::memset(memory->at(slots[2]), 2, Slot::kBytes);
  arena.release(slots[1]);
  CHECK_EQ(committed(fd), before + 3 * Slot::kHeaderBytes + Slot::kBytes - Slot::kHeaderBytes);
  arena.release(slots[1]);                                  // a second release does nothing
  memory->slot(slots[1]).header().doorbell.state.store(0);  // a late ring
  CHECK_EQ(arena.reserve(), slots[1]);
  CHECK(is_filled(memory->at(slots[1]), Slot::kBytes, 0));
  CHECK(*memory->at(slots[2]) == std::byte{2});
  CHECK(*memory->at(slots[2] + Slot::kBytes - 1) == std::byte{2});
  for (const std::size_t slot : slots) arena.release(slot);
  CHECK_EQ(committed(fd), before);
  arena.free(arena.allocate(4 * Slot::kBytes));  // free ranges have joined again
}

/// Gives the ranks memory with larger arenas.
void share_larger_memory(std::vector<World>& worlds, std::size_t arena_bytes) {
  for (const std::vector<int>& ranks : worlds.front().topology.hosts()) {
    const Fd memory = HostMemory::create(static_cast<int>(ranks.size()), {}, arena_bytes);
    for (const int rank : ranks) {
      at(worlds, rank).slots.clear();
      share_host_memory(at(worlds, rank), duplicate(memory));
    }
  }
}

/// Two sets of the same ranks, with slots at different offsets on every rank.
TEST(slots_of_two_sets_are_independent_and_share_buffers) {
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1}}) {
    const std::size_t size = host_of.size();
    std::vector<World> worlds = make_worlds(host_of);
    share_larger_memory(worlds, 4 * Slot::kBytes);
    std::vector<World> others = make_worlds(host_of);  // for the set's connections
    std::vector<std::size_t> offsets;
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (std::size_t i = 0; i < rank; ++i) worlds[rank].arena->allocate(Slot::kBytes / 2);
      const std::size_t first = worlds[rank].arena->reserve();
      offsets.push_back(rank % 2 == 0 ? first : worlds[rank].arena->reserve());
    }
    CHECK(offsets[0] != offsets[1]);
    for (std::size_t rank = 0; rank < size; ++rank) {
      World& other = others[rank];
      other.arena = worlds[rank].arena;
      other.slots = worlds[rank].slots;
      const auto ranks = other.topology.ranks_of_host(other.topology.host());
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        other.slots[i].offset = offsets[static_cast<std::size_t>(ranks[i])];
      }
    }
    run_ranks(static_cast<int>(size), [&](int rank) {
      Abort abort;
      const EngineConfig config = patient();
      const auto world = make_communicator(at(worlds, rank), config, abort);
      const auto set = make_communicator(at(others, rank), config, abort);
      const Reduction sum{DType::kFloat32, ReduceOp::kSum, {}};
      constexpr std::size_t kCount = 300'000;
      // A buffer allocated by one is shared memory for the other.
      const std::shared_ptr<void> memory = world->allocate_shared(kCount * sizeof(float));
      auto* const values = static_cast<float*>(memory.get());
      const std::int64_t offset = set->shared_offset_of(values, kCount * sizeof(float));
      CHECK(offset > 0);
      std::vector<std::int64_t> all(size);
      const std::vector<std::size_t> each(size, sizeof offset);
      const auto of_host = [&] {
        std::vector<std::int64_t> offsets;
        const Topology& topology = at(worlds, rank).topology;
        for (const int other : topology.ranks_of_host(topology.host())) {
          offsets.push_back(at(all, other));
        }
        return offsets;
      };
      float factor = 1;
      for (HostCommunicator* const one : {set.get(), world.get(), set.get()}) {
        one->allgather(&offset, all.data(), each);
        std::fill_n(values, kCount, static_cast<float>(rank + 1) * factor);
        one->barrier();
        one->allreduce(values, values, kCount, sum, of_host());
        std::vector<float> own(kCount, static_cast<float>(rank + 1));
        one->allreduce(own.data(), own.data(), kCount, sum, {});
        CHECK(std::all_of(values, values + kCount, [&](float x) { return x == 6 * factor; }));
        CHECK(std::all_of(own.begin(), own.end(), [](float x) { return x == 6; }));
        one->barrier();
        factor *= 2;
      }
    });
  }
}

}  // namespace

}  // namespace torch_ring::test::shared_arena_test
