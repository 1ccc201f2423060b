// SPDX-License-Identifier: Apache-2.0
// Entries: a rank's announcements as bytes. Pure, no threads.
#include "engine/entry.h"

#include <cstring>

#include "entries.h"
#include "harness.h"

namespace torch_ring::test::entry_test {
namespace {

TEST(fingerprint_is_equal_after_encode_and_decode) {
  Fingerprint fingerprint = broadcast("layer.0.weight", 2);
  fingerprint.dtype = DType::kBFloat16;
  fingerprint.prescale = 0.5;
  fingerprint.shape = {4, 0, 7};
  Bytes encoded;
  encode(fingerprint, encoded);
  CHECK(decode(encoded) == fingerprint);
}

/// A rank that has joined allocates memory according to the others' shapes.
TEST(decode_throws_for_shapes_that_no_tensor_has) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 31;
  Bytes encoded;
  for (const auto& shape : {std::vector<std::int64_t>{2, -1}, {kHuge, kHuge}, {kHuge, 2, kHuge}}) {
    encode(allreduce("a", shape), encoded);
    CHECK_THROWS(decode(encoded), ErrorKind::kInternal, "broken entry");
  }
  for (const auto& shape : {std::vector<std::int64_t>{kHuge, kHuge / 4}, {kHuge, kHuge, 0}, {}}) {
    encode(allreduce("a", shape), encoded);
    CHECK(decode(encoded).shape == shape);
  }
}

TEST(entry_says_whether_its_rank_is_blocked_and_shares_its_device) {
  EntryWriter writer;
  for (const bool blocked : {false, true}) {
    for (const bool shares : {false, true}) {
      writer.clear(blocked, shares);
      const Post post = writer.post();
      const EntryReader entry(post.common, post.own);
      CHECK_EQ(entry.blocked(), blocked);
      CHECK_EQ(entry.shares_device(), shares);
    }
  }
}

TEST(entry_reader_throws_for_truncated_entries) {
  const Parts whole = entry_with({{allreduce("a"), "data", {}, 64}, {allreduce("b"), "", {1, 2}}});
  CHECK_EQ(read(whole).size(), 2u);
  for (Bytes Parts::* part : {&Parts::common, &Parts::own}) {
    for (std::size_t bytes = 0; bytes + 8 <= (whole.*part).size(); bytes += 4) {
      Parts truncated = whole;
      (truncated.*part).resize(bytes);
      CHECK_THROWS(read(truncated), ErrorKind::kInternal, "broken entry");
    }
  }
  Parts grown = whole;
  const std::uint64_t huge = ~0ull;
  std::memcpy(grown.own.data(), &huge, sizeof huge);  // the bytes of the payload
  CHECK_THROWS(read(grown), ErrorKind::kInternal, "broken entry");
}

TEST(entries_are_equal_wherever_their_shared_buffers_lie) {
  const Parts here = entry_with({{allreduce("a"), "", {}, 64}});
  const Parts there = entry_with({{allreduce("a"), "", {}, 4096}});
  CHECK(here.common == there.common);
  CHECK(here.own.empty() && there.own.empty());
  CHECK(read(here)[0].is_shared);
  CHECK_EQ(shared_offset(here.local, 0), 64);
  CHECK_EQ(shared_offset(there.local, 0), 4096);
  CHECK_THROWS(shared_offset(here.local, 1), ErrorKind::kInternal, "broken entry");
}

}  // namespace
}  // namespace torch_ring::test::entry_test
