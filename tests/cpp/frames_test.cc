// SPDX-License-Identifier: Apache-2.0
// BruckFrames: the bytes that a rank sends for the agreement, with 8 to 4096 simulated ranks.
#include "collective/frames.h"

#include <bit>
#include <random>
#include <string>

#include "simulated_members.h"

namespace torch_ring::test::frames_test {
namespace {

ByteSpan bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

const std::string kCommon(120, 'c');  // a request's fingerprint has about as many bytes
constexpr std::size_t kFrameBytes = 24 + 16 + 120;

std::size_t steps_among(std::size_t members) {
  return static_cast<std::size_t>(std::bit_width(members - 1));
}

/// Entries of `ranks` ranks, all equal.
std::vector<ByteSpan> equal_entries(std::size_t ranks) {
  return std::vector<ByteSpan>(ranks, bytes_of(kCommon));
}

void check_constant(const std::vector<int>& member_counts, int ranks_each) {
  for (const int members : member_counts) {
    SimulatedMembers world(members, ranks_each);
    const auto ranks = static_cast<std::size_t>(members * ranks_each);
    for (int round = 0; round < 2; ++round) {
      const auto sent = world.round(equal_entries(ranks));
      CHECK_EQ(sent.frames, steps_among(world.count()));
      CHECK_EQ(sent.bytes, sent.frames * kFrameBytes);
    }
    for (std::size_t member = 0; member < world.count(); ++member) {
      const Runs& runs = world.member(member).runs();
      CHECK_EQ(runs.items().size(), 1u);
      CHECK_EQ(runs.ranks(), ranks);
    }
  }
}

TEST(frames_have_constant_size_while_all_entries_are_equal) {
  check_constant({1, 2, 3, 8, 9, 64, 511, 512, 4096}, 1);
}

TEST(frames_have_constant_size_between_hosts_of_8_ranks) { check_constant({2, 3, 8, 64, 512}, 8); }

TEST(frames_have_constant_size_while_own_parts_are_equal_too) {
  SimulatedMembers world(300, 1);
  const auto sent = world.round(equal_entries(300), equal_entries(300));
  CHECK_EQ(sent.bytes, 9 * (kFrameBytes + 8 + 120));
}

TEST(frames_of_one_rank_that_differs_tell_everyone_both_entries) {
  const std::string other(112, 'o');
  for (const int ranks_each : {1, 8}) {
    const int members = 4096 / ranks_each;
    SimulatedMembers world(members, ranks_each);
    for (const std::size_t rank : {0u, 1u, 2077u, 4095u}) {
      auto entries = equal_entries(4096);
      entries[rank] = bytes_of(other);
      const auto sent = world.round(entries);
      // At most equal entries, the different one, and equal entries again.
      CHECK(sent.bytes <= sent.frames * (kFrameBytes + 16 + 112 + 16 + 120));
      for (std::size_t member = 0; member < world.count(); member += 89) {
        const Runs& runs = world.member(member).runs();
        CHECK_EQ(runs.ranks(), 4096u);
        CHECK_EQ(runs.items().size(), rank == 0 || rank == 4095 ? 2u : 3u);
        const Runs at_rank = runs.part(static_cast<std::uint32_t>(rank), 1);
        CHECK_EQ(at_rank.items()[0].common.size(), 112u);
        const Runs before = runs.part(0, static_cast<std::uint32_t>(rank));
        CHECK(before.items().empty() || before.items()[0].common.size() == 120u);
      }
    }
  }
}

TEST(frames_bring_every_entry_to_every_member) {
  std::mt19937 random(20);
  const std::vector<std::string> texts{"", "a", "other", std::string(100, 'x'), "y"};
  const auto any = [&] { return bytes_of(texts[random() % texts.size()]); };
  for (const int ranks_each : {1, 3}) {
    for (const int members : {1, 2, 3, 5, 8, 13}) {
      SimulatedMembers world(members, ranks_each);
      const auto ranks = static_cast<std::size_t>(members * ranks_each);
      for (int round = 0; round < 20; ++round) {
        std::vector<ByteSpan> common(ranks);
        std::vector<ByteSpan> own(ranks);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          common[rank] = round % 2 == 0 ? bytes_of(kCommon) : any();
          own[rank] = any();
        }
        world.round(common, own);
        for (std::size_t member = 0; member < world.count(); ++member) {
          const Runs& runs = world.member(member).runs();
          for (std::size_t rank = 0; rank < ranks; ++rank) {
            const Runs entry = runs.part(static_cast<std::uint32_t>(rank), 1);
            CHECK(std::ranges::equal(entry.items()[0].common, common[rank]));
            CHECK(std::ranges::equal(entry.items()[0].own, own[rank]));
          }
        }
      }
    }
  }
}

TEST(frames_that_all_differ_have_the_bytes_of_all_entries) {
  const std::size_t ranks = 64;
  std::vector<std::string> texts(ranks);
  std::vector<ByteSpan> entries(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    texts[rank] = std::string(40, static_cast<char>('0' + rank));
    entries[rank] = bytes_of(texts[rank]);
  }
  SimulatedMembers world(64, 1);
  CHECK_EQ(world.round(entries).bytes, 6 * 24 + 63 * (16 + 40u));
}

TEST(frames_know_whose_entries_are_here) {
  SimulatedMembers world(5, 2);
  world.round(equal_entries(10));
  BruckFrames frames(1, std::vector<std::uint32_t>(5, 2), 1000);
  frames.begin(world.member(0).runs().part(0, 2));
  for (const int known : {1, 2, 4}) {
    CHECK_EQ(frames.members_known(), known);
    const std::size_t step = frames.due();
    const auto from = static_cast<std::size_t>(frames.steps()[step].from);
    receive(frames, world.member(from).frame(step));
  }
  CHECK_EQ(frames.members_known(), 5);
}

}  // namespace
}  // namespace torch_ring::test::frames_test
