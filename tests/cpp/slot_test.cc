// SPDX-License-Identifier: Apache-2.0
// Slots of process sets: their places beside buffers, and two sets of the same ranks.
#include "transport/slot.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "elements.h"
#include "memory/huge_pages.h"
#include "test_world.h"
#include "transport/shared_arena.h"
#include "transport/shared_memory.h"

namespace torch_ring::test::slot_test {
namespace {

constexpr std::size_t kArenaBytes = 16u << 20;
constexpr std::size_t kPage = 4096;

std::size_t committed(const Fd& fd) {
  struct stat status{};
  CHECK_EQ(::fstat(fd.get(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

std::shared_ptr<const SharedMemory> view(const std::shared_ptr<const HostMemory>& host, int rank) {
  return std::make_shared<const SharedMemory>(host, rank);
}

TEST(slots_of_a_memory_lie_where_its_map_says) {
  const auto host = std::make_shared<const HostMemory>(HostMemory::create(1, {}, 3 * Slot::kBytes));
  const SharedMemory memory(host, 0);
  for (const std::size_t offset :
       {std::size_t{0}, SharedMemory::kArena, SharedMemory::kArena + kHugePage,
        memory.size_bytes() - Slot::kBytes}) {
    CHECK(reinterpret_cast<std::byte*>(&memory.slot(offset).header()) == memory.at(offset));
    CHECK(memory.slot(offset).rounds() + Slot::kRoundBytes <= memory.at(offset) + Slot::kBytes);
  }
  for (const std::size_t offset :
       {std::size_t{1}, kHugePage, SharedMemory::kArena - kHugePage, SharedMemory::kArena + kPage,
        memory.size_bytes() - Slot::kBytes + kHugePage, memory.size_bytes(),
        std::size_t{0} - kHugePage}) {
    CHECK_THROWS(memory.slot(offset), ErrorKind::kInternal, "has no slot at offset");
  }
}

TEST(slots_are_reserved_without_memory_and_read_as_zeros_again) {
  const Fd fd = HostMemory::create(1, {}, 4 * Slot::kBytes);
  const auto host = std::make_shared<const HostMemory>(duplicate(fd));
  const auto memory = view(host, 0);
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

TEST(slots_and_buffers_share_an_arena) {
  const Fd fd = HostMemory::create(1, {}, 8 * Slot::kBytes);
  const auto host = std::make_shared<const HostMemory>(duplicate(fd));
  const auto memory = view(host, 0);
  SharedArena arena(memory);
  const std::size_t before = committed(fd);
  std::mt19937 random(3);
  std::vector<std::pair<std::size_t, int>> slots;
  std::vector<std::pair<void*, std::size_t>> buffers;
  for (int step = 1; step <= 200; ++step) {
    const bool grow = random() % 2 == 0;
    if (random() % 2 == 0) {
      if (grow && slots.size() < 3) {
        const std::size_t slot = arena.reserve();
        CHECK(is_filled(memory->at(slot), Slot::kBytes, 0));
        std::memset(memory->at(slot), step, Slot::kBytes);
        slots.emplace_back(slot, step);
      } else if (!slots.empty()) {
        const auto [slot, value] = slots.back();
        CHECK(is_filled(memory->at(slot), Slot::kBytes, value % 256));
        arena.release(slot);
        slots.pop_back();
      }
    } else if (grow && buffers.size() < 8) {
      const std::size_t bytes = 1 + random() % (3u << 20);
      void* const data = arena.allocate(bytes);
      std::memset(data, 0xff, bytes);
      buffers.emplace_back(data, bytes);
    } else if (!buffers.empty()) {
      const auto i = random() % buffers.size();
      CHECK(is_filled(buffers[i].first, buffers[i].second, 0xff));
      arena.free(buffers[i].first);
      buffers.erase(buffers.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  for (const auto& [slot, value] : slots) arena.release(slot);
  for (const auto& [data, bytes] : buffers) arena.free(data);
  CHECK_EQ(committed(fd), before);
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

TEST(slots_must_be_as_many_as_the_ranks_of_a_host) {
  std::vector<World> worlds = make_worlds({0, 0});
  const EngineConfig config;
  Abort abort;
  worlds[0].slots.pop_back();
  CHECK_THROWS(make_communicator(worlds[0], config, abort), ErrorKind::kInternal,
               "2 ranks share a host, but 1 have a slot");
  worlds[1].slots[0].offset = 4096;
  CHECK_THROWS(make_communicator(worlds[1], config, abort), ErrorKind::kInternal,
               "has no slot at offset 4096");
  World world = std::move(make_worlds({0, 1}).front());
  world.topology.host_of = {0, 0};
  CHECK_THROWS(share_host_memory(world, HostMemory::create(3, {}, kArenaBytes)),
               ErrorKind::kInternal, "is for 3 ranks, not for 2");
}

}  // namespace
}  // namespace torch_ring::test::slot_test
