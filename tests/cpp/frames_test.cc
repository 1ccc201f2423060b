// SPDX-License-Identifier: Apache-2.0
// Runs: entries of consecutive ranks to bytes, and back; the frames of hosts that pass them on.
#include "collective/frames.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "collective/runs.h"
#include "core/at.h"
#include "harness.h"

namespace torch_ring::test::frames_test {
namespace {

ByteSpan bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string text_of(ByteSpan bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// "3 x common/own, 1 x ..."
std::string shown(const Runs& runs) {
  std::string text;
  for (const EqualEntries& item : runs.items()) {
    text += (text.empty() ? "" : ", ") + std::to_string(item.count) + " x " + text_of(item.common) +
            "/" + text_of(item.own);
  }
  return text;
}

std::vector<std::byte> encoded(const Runs& runs) {
  std::vector<std::byte> bytes(encoded_bytes(runs));
  CHECK(encode(runs, bytes.data()) == bytes.data() + bytes.size());
  return bytes;
}

void check_broken(const std::vector<std::uint64_t>& words, const std::string& what) {
  Runs runs;
  CHECK_THROWS(decode(std::as_bytes(std::span(words)), 2, 100, runs), ErrorKind::kInternal, what);
}

constexpr std::uint64_t words(std::uint32_t low, std::uint32_t high) {
  return low | std::uint64_t{high} << 32;
}

const std::string kA = "a", kB = "bb", kX = "xxxxxxxxx", kY = "y", kNone;

Runs example() {
  Runs runs;
  runs.append({2, bytes_of(kA), bytes_of(kNone)});
  runs.append({3, bytes_of(kB), bytes_of(kX)});
  runs.append({1, bytes_of(kB), bytes_of(kNone)});
  runs.append({1, bytes_of(kB), bytes_of(kY)});
  runs.append({4, bytes_of(kNone), bytes_of(kNone)});
  return runs;
}

TEST(runs_are_equal_after_encode_and_decode) {
  const Runs runs = example();
  const auto bytes = encoded(runs);
  Runs decoded;
  decode(bytes, 11, 24, decoded);
  CHECK_EQ(shown(decoded), std::string("2 x a/, 3 x bb/xxxxxxxxx, 1 x bb/, 1 x bb/y, 4 x /"));
  CHECK_EQ(decoded.ranks(), 11u);
  for (const EqualEntries& item : decoded.items()) {
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(item.common.data()) % 8, 0u);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(item.own.data()) % 8, 0u);
  }
}

TEST(runs_of_equal_entries_are_one_item) {
  const std::string other = kA;  // equal bytes elsewhere
  Runs runs;
  runs.append({2, bytes_of(kA), bytes_of(kX)});
  runs.append({3, bytes_of(other), bytes_of(kX)});
  CHECK_EQ(shown(runs), std::string("5 x a/xxxxxxxxx"));
  Runs more;
  more.append({1, bytes_of(kA), bytes_of(kX)});
  runs.append(more);
  CHECK_EQ(runs.ranks(), 6u);
  CHECK_EQ(runs.items().size(), 1u);
}

TEST(runs_decode_throws_for_broken_bytes) {
  check_broken({}, "too few entries");
  check_broken({1}, "does not fit");
  check_broken({words(1, 0), 0}, "too few entries");
  check_broken({words(0, 0), 0}, "other ranks");
  check_broken({words(3, 0), 0}, "other ranks");
  check_broken({words(2, 0), 0, words(1, 0), 0}, "other ranks");
  check_broken({words(2, 9), 0, 0}, "does not fit");
  check_broken({words(2, ~0u), 0, 0}, "does not fit");
  check_broken({words(2, 0), ~0ull, 0}, "does not fit");
  check_broken({words(2, 0), 8, words(1, 0)}, "does not fit");  // the second own part
  check_broken({words(2, 0), 8, words(3, 0)}, "other ranks");
  check_broken({words(2, 0), 8, words(2, 8), 0}, "does not fit");  // beyond the own parts
  check_broken({words(2, 0), 16, words(2, 0), 0}, "more than its entries");
  std::vector<std::uint64_t> long_entry(16);
  long_entry[0] = words(2, 101);
  check_broken(long_entry, "does not fit");
}

TEST(runs_in_another_order_are_brought_into_that_of_the_ranks) {
  Runs runs;  // of ranks 0, 2, 4 and 1, 3
  runs.append({3, bytes_of(kA), bytes_of(kNone)});
  runs.append({2, bytes_of(kB), bytes_of(kNone)});
  RoundEntries entries;
  const auto firsts = [&] {
    std::vector<int> firsts;
    for (const Run& run : entries.runs()) firsts.push_back(run.first);
    return firsts;
  };
  const std::vector<int> order{0, 2, 4, 1, 3};
  entries.assign(runs, order);
  CHECK_EQ(firsts(), (std::vector<int>{0, 1, 2, 3, 4}));
  CHECK_EQ(text_of(entries.runs()[3].common), kB);
  entries.assign(runs);
  CHECK_EQ(firsts(), (std::vector<int>{0, 3}));
  CHECK_EQ(entries.runs()[1].count, 2);
}

TEST(runs_that_do_not_fit_a_slot_are_an_error_for_its_readers) {
  const std::size_t capacity = safe_capacity(1000, 8);
  CHECK_EQ(capacity, 96u);  // 8 of them, with their headers, have 960 bytes of 992
  const auto different = [](std::size_t bytes, std::size_t ranks) {
    std::vector<std::string> entries(ranks);
    Runs runs;
    for (std::size_t i = 0; i < ranks; ++i) {
      entries[i] = std::string(bytes, static_cast<char>('a' + i));
      runs.append({1, bytes_of(entries[i]).first(bytes - 8), bytes_of(entries[i]).first(8)});
    }
    std::vector<std::byte> slot(1000);
    write_slot(slot, runs);
    Runs read;
    read_slot(slot, static_cast<std::uint32_t>(ranks), 500, read);
    return read.items().size();
  };
  CHECK_EQ(different(capacity, 8), 8u);
  CHECK_THROWS(different(120, 8), ErrorKind::kInternal,
               "too many of 8 ranks announced different requests at once: they have 1152 bytes, "
               "and 992 fit shared memory");
  CHECK_EQ(safe_capacity(1000, 100), 0u);

  Runs equal;  // of more ranks than the slot has bytes
  equal.append({100'000, bytes_of(kX), bytes_of(kA)});
  std::vector<std::byte> slot(1000);
  write_slot(slot, equal);
  Runs read;
  read_slot(slot, 100'000, 500, read);
  CHECK_EQ(shown(read), std::string("100000 x xxxxxxxxx/a"));
}

/// The frames of all members after a round in which rank r posts entries[r].
std::vector<std::unique_ptr<BruckFrames>> after_a_round(std::size_t members,
                                                        const std::vector<ByteSpan>& entries) {
  const std::size_t each = entries.size() / members;
  const std::vector<std::uint32_t> ranks(members, static_cast<std::uint32_t>(each));
  std::vector<std::unique_ptr<BruckFrames>> all;
  for (std::size_t member = 0; member < members; ++member) {
    Runs runs;
    for (std::size_t i = 0; i < each; ++i) runs.append({1, entries[member * each + i], {}});
    all.push_back(std::make_unique<BruckFrames>(static_cast<int>(member), ranks, 64u << 10));
    all.back()->begin(runs);
  }
  for (std::size_t step = 0; step < all.front()->steps().size(); ++step) {
    for (const auto& to : all) {
      ByteSpan bytes = at(all, to->steps()[step].from)->frame(step);
      while (!bytes.empty()) {
        const std::span<std::byte> room = to->room();
        const std::size_t count = std::min(room.size(), bytes.size());
        std::copy_n(bytes.begin(), count, room.begin());
        to->absorb(count);
        bytes = bytes.subspan(count);
      }
    }
  }
  for (const auto& member : all) CHECK(member->complete());
  return all;
}

const std::string kCommon(120, 'c');  // a request's fingerprint has about as many bytes
constexpr std::size_t kFrameBytes = 24 + 16 + 120;

TEST(frames_have_constant_size_while_all_entries_are_equal) {
  for (const auto& [members, ranks] :
       {std::pair{1, 1}, {3, 3}, {9, 9}, {4096, 4096}, {512, 4096}}) {
    const auto count = static_cast<std::size_t>(members);
    const std::vector<ByteSpan> entries(static_cast<std::size_t>(ranks), bytes_of(kCommon));
    for (const auto& member : after_a_round(count, entries)) {
      CHECK_EQ(member->steps().size(), static_cast<std::size_t>(std::bit_width(count - 1)));
      for (std::size_t step = 0; step < member->steps().size(); ++step) {
        CHECK_EQ(member->frame(step).size(), kFrameBytes);
      }
      CHECK_EQ(member->runs().items().size(), 1u);
      CHECK_EQ(member->runs().ranks(), entries.size());
    }
  }
}

TEST(frames_of_one_rank_that_differs_tell_everyone_both_entries) {
  const std::string other(112, 'o');
  for (const std::size_t rank : {0u, 2077u, 4095u}) {
    std::vector<ByteSpan> entries(4096, bytes_of(kCommon));
    entries[rank] = bytes_of(other);
    for (const auto& member : after_a_round(512, entries)) {
      const Runs& runs = member->runs();
      CHECK_EQ(runs.items().size(), rank == 2077 ? 3u : 2u);
      CHECK_EQ(runs.part(static_cast<std::uint32_t>(rank), 1).items()[0].common.size(), 112u);
      // At most equal entries, the different one, and equal entries again.
      CHECK(member->frame(8).size() <= kFrameBytes + 16 + 112 + 16 + 120);
    }
  }
}

}  // namespace
}  // namespace torch_ring::test::frames_test
