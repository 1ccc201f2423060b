// SPDX-License-Identifier: Apache-2.0
// The board of several hosts, and a leader that hands its host garbled entries.
#include "collective/hierarchical_board.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "test_world.h"

namespace torch_ring::test::hierarchical_board_test {
namespace {

/// Checks that a member of a host refuses its leader's world slot with these words.
void check_refused(const std::vector<std::uint64_t>& words, const std::string& what) {
  std::vector<World> worlds = make_worlds({0, 0, 1});
  const SharedMemory& leader = *worlds[1].slots[0].memory;
  leader.commit(0, Slot::kBytes);
  Abort abort;
  const auto member = make_communicator(worlds[1], patient(), abort);
  member->board().post({});

  const Slot slot = leader.slot(0);
  std::memcpy(slot.world_entries(1), words.data(), words.size() * sizeof words[0]);
  slot.header().posted = 1;
  CHECK(!member->board().complete());
  slot.header().published = 1;
  CHECK_THROWS(member->board().complete(), ErrorKind::kInternal, what);
}

/// Three ranks with an empty entry each, as one group.
constexpr std::uint64_t kThreeRanks = 3;

TEST(hierarchical_board_believes_no_size_of_its_leader) {
  constexpr std::uint64_t kRoom = Slot::kWorldSlotBytes - sizeof(std::uint64_t);
  check_refused({kRoom + 1, kThreeRanks, 0}, "and " + std::to_string(kRoom) + " fit");
  check_refused({std::numeric_limits<std::uint64_t>::max(), kThreeRanks, 0}, "fit shared memory");
  check_refused({0}, "too few entries");
  check_refused({8, kThreeRanks}, "does not fit");
  check_refused({16, kThreeRanks | std::uint64_t{9} << 32, 0}, "does not fit");
  check_refused({16, kThreeRanks, std::numeric_limits<std::uint64_t>::max()}, "does not fit");
  check_refused({16, kThreeRanks + 1, 0}, "other ranks");
}

}  // namespace
}  // namespace torch_ring::test::hierarchical_board_test
