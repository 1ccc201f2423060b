// SPDX-License-Identifier: Apache-2.0
// The address space of a host's memory: enough for its ranks, and within the process's limit.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "forked.h"
#include "memory/huge_pages.h"
#include "transport/host_memory.h"
#include "transport/slot.h"

namespace torch_ring::test::address_space_test {
namespace {

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
      if (kSanitized || ranks > 4096) continue;  // a sanitizer has most of the address space
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

TEST(host_memory_fits_little_address_space) {
  constexpr std::size_t kMachine = std::size_t{1} << 41;
  for (const int ranks : {1, 2, 3, 64}) {
    const std::size_t least = HostMemory::least_bytes(ranks);
    CHECK_EQ(HostMemory::arena_bytes(ranks, kMachine, least), kHugePage);
    CHECK_THROWS(HostMemory::arena_bytes(ranks, kMachine, least - 1), ErrorKind::kInternal,
                 "too few for the memory of " + std::to_string(ranks) + " ranks");
    for (const std::size_t most : {least, least + 1, 2 * least, 7 * least}) {
      const std::size_t arena = HostMemory::arena_bytes(ranks, kMachine, most);
      CHECK(static_cast<std::size_t>(ranks) * (Slot::kBytes + arena) <= most);
      CHECK_EQ(arena % kHugePage, std::size_t{0});
    }
    const HostMemory host(
        HostMemory::create(ranks, {}, HostMemory::arena_bytes(ranks, kMachine, least)));
    CHECK_EQ(host.size_bytes(), least + kHugePage);
  }
}

TEST(host_memory_leaves_half_of_a_limited_address_space) {
  if (kSanitized) return;  // a sanitizer has mapped more than any limit
  CHECK(HostMemory::mappable_bytes() >= std::size_t{1} << 30);
  CHECK(HostMemory::mappable_bytes() <= HostMemory::kMostAddressSpace);
  for (const std::size_t spare : {std::size_t{8} << 20, std::size_t{3} << 30}) {
    CHECK(holds_in_child([&] {
      std::size_t used = 0;  // pages
      std::ifstream("/proc/self/statm") >> used;
      const rlim_t limit = used * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + spare;
      const rlimit limited{limit, limit};
      CHECK_EQ(::setrlimit(RLIMIT_AS, &limited), 0);
      const std::size_t bytes = HostMemory::mappable_bytes();
      CHECK(bytes <= spare / 2);
      CHECK(bytes > spare / 8);
      if (bytes < HostMemory::least_bytes(2)) return true;
      const HostMemory host(
          HostMemory::create(2, {}, HostMemory::arena_bytes(2, std::size_t{1} << 41, bytes)));
      CHECK(host.size_bytes() <= bytes + kHugePage);
      CHECK_THROWS(HostMemory(HostMemory::create(2, {}, spare)), ErrorKind::kInternal,
                   "`ulimit -v`");
      return true;
    }));
  }
}

}  // namespace
}  // namespace torch_ring::test::address_space_test
