// The memory of a host: its layout, its views, what is refused of it, and slots.
#include "transport/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memory/huge_pages.h"
#include "test_world.h"
#include "transport/shared_arena.h"
#include "transport/shared_memory.h"

namespace torch_ring::test {
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

bool is_zero(const std::byte* data, std::size_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

std::shared_ptr<const SharedMemory> view(const std::shared_ptr<const HostMemory>& host, int rank) {
  return std::make_shared<const SharedMemory>(host, rank);
}

/// A memfd like torch_ring's, with any contents; sealed if wanted.
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
  const Fd fd = HostMemory::create(4, bytes_of("four"));
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

TEST(host_memory_of_many_ranks_fits_the_address_space) {
  const Fd fd = HostMemory::create(4096, {});
  CHECK(size_of(fd) <= HostMemory::kMostAddressSpace + kHugePage);
  if (!kSanitized) {  // a sanitizer has most of the address space itself
    const HostMemory host(duplicate(fd));
    CHECK_EQ(host.ranks(), 4096);
    CHECK(*host.rank_begin(4095) == std::byte{0});
  }
  for (const int ranks : {-1, 0, HostMemory::kMostRanks + 1}) {
    CHECK_THROWS(HostMemory::create(ranks, {}), ErrorKind::kInvalidArgument,
                 "not " + std::to_string(ranks));
  }
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
  constexpr std::size_t kHeader = 32;  // bytes that mean something
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
  // Only the table's length has other values that fit: those up to the first rank's memory.
  CHECK(accepted > 0 && accepted <= 21);
  std::mt19937_64 random(20);
  for (int i = 0; i < 500; ++i) {
    std::vector<std::byte> mutated = head;
    const std::uint64_t number = random() >> (random() % 64);
    std::memcpy(mutated.data() + 8 + random() % 3 * 8, &number, sizeof number);
    try_with(mutated);
  }
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
    static_cast<void>(memory->slot(slots.back()));  // it is one
  }
  CHECK_THROWS(arena.reserve(), ErrorKind::kInternal, "another process set");
  CHECK_THROWS(arena.allocate(1), ErrorKind::kInternal, "left");

  std::ranges::sort(slots);
  for (std::size_t i = 1; i < 4; ++i) CHECK_EQ(slots[i] - slots[i - 1], Slot::kBytes);
  std::memset(memory->at(slots[1]), 1, Slot::kBytes);
  std::memset(memory->at(slots[2]), 2, Slot::kBytes);
  arena.release(slots[1]);
  CHECK_EQ(committed(fd), before + 3 * Slot::kHeaderBytes + Slot::kBytes - Slot::kHeaderBytes);
  arena.release(slots[1]);                                  // again: nothing
  memory->slot(slots[1]).header().doorbell.state.store(0);  // a late ring
  CHECK_EQ(arena.reserve(), slots[1]);
  CHECK(is_zero(memory->at(slots[1]), Slot::kBytes));
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
        CHECK(is_zero(memory->at(slot), Slot::kBytes));
        std::memset(memory->at(slot), step, Slot::kBytes);
        slots.emplace_back(slot, step);
      } else if (!slots.empty()) {
        const auto [slot, value] = slots.back();
        const std::byte filled = static_cast<std::byte>(value);
        CHECK(std::all_of(memory->at(slot), memory->at(slot + Slot::kBytes),
                          [&](std::byte byte) { return byte == filled; }));
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
      const auto* const data = static_cast<const std::byte*>(buffers[i].first);
      CHECK(std::all_of(data, data + buffers[i].second,
                        [](std::byte byte) { return byte == std::byte{0xff}; }));
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

/// Two sets of the same ranks, with slots at other offsets on every rank, beside the world.
TEST(slots_of_two_sets_are_independent_and_share_buffers) {
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1}}) {
    const std::size_t size = host_of.size();
    std::vector<World> worlds = make_worlds(host_of);
    share_larger_memory(worlds, 4 * Slot::kBytes);
    std::vector<World> others = make_worlds(host_of);  // for its connections
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
      // A buffer allocated for one is shared memory of the other.
      const std::shared_ptr<void> memory =
          world->shared_buffers()->allocate(kCount * sizeof(float));
      auto* const values = static_cast<float*>(memory.get());
      const std::int64_t offset = set->shared_buffers()->offset_of(values, kCount * sizeof(float));
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
}  // namespace torch_ring::test
