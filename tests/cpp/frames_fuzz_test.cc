// SPDX-License-Identifier: Apache-2.0
// Fuzzed frames: random and mutated bytes are an Error or entries, at a cost bounded by their size.
#include <cstring>
#include <string>

#include "fuzz.h"
#include "simulated_members.h"

namespace torch_ring::test::frames_fuzz_test {
namespace {

constexpr std::size_t kCapacity = 1000;
constexpr int kMembers = 7;
constexpr int kRanksEach = 3;
constexpr int kTries = kSanitized ? 20'000 : 200'000;

using Frame = std::vector<std::byte>;

/// A frame with some changes, among them sizes; in some the header agrees with the length.
Frame changed(const Frame& frame, Rng& random) {
  Frame it = mutate(frame, random);
  if (it.size() >= 24 && below(3, random) == 0) {
    const std::uint64_t bytes = it.size() - 24;
    std::memcpy(it.data() + 16, &bytes, sizeof bytes);
  }
  return it;
}

/// Feeds a frame to the step that is due. Returns whether it was accepted; checks that accepted
/// entries are consistent.
bool feed(BruckFrames& frames, const Frame& frame) {
  const std::size_t step = frames.due();
  try {
    for (ByteSpan rest = frame; !rest.empty() && frames.due() == step;) {
      const std::span<std::byte> room = frames.room();
      CHECK(!room.empty());
      // The room for missing bytes is bounded by the received ones.
      CHECK(room.size() <= (64u << 10) + frame.size());
      const std::size_t count = std::min(room.size(), rest.size());
      std::copy_n(rest.begin(), count, room.begin());
      rest = rest.subspan(count);
      frames.absorb(count);
    }
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kInternal);
    return false;
  }
  if (!frames.complete()) return frames.due() > step;
  std::uint32_t ranks = 0;
  std::size_t sum = 0;
  for (const EqualEntries& item : frames.runs().items()) {
    CHECK(item.count > 0);
    CHECK(item.common.size() + item.own.size() <= kCapacity);
    ranks += item.count;
    for (const std::byte byte : item.common) sum += std::to_integer<std::size_t>(byte);
    for (const std::byte byte : item.own) sum += std::to_integer<std::size_t>(byte);
  }
  CHECK_EQ(ranks, static_cast<std::uint32_t>(kMembers * kRanksEach));
  CHECK(sum < (std::size_t{1} << 40));  // every byte was read
  return true;
}

const std::string kTexts[] = {"", "request", std::string(90, 'f'), "payload", "p"};

/// The frames of a round with runs of all kinds, and the entries of member 0.
struct Example {
  explicit Example(Rng& random) : world(kMembers, kRanksEach, kCapacity) {
    const auto text = [&](std::size_t first, std::size_t count) {
      return std::as_bytes(std::span(kTexts[first + random() % count]));
    };
    std::vector<ByteSpan> common;
    std::vector<ByteSpan> own;
    for (int rank = 0; rank < kMembers * kRanksEach; ++rank) {
      common.push_back(text(0, 3));
      own.push_back(random() % 2 == 0 ? ByteSpan{} : text(3, 2));
      if (rank < kRanksEach) first.append({1, common.back(), own.back()});
    }
    world.round(common, own);
  }

  /// The frame that member 0 receives in `step`.
  Frame frame(std::size_t step) const {
    const auto from = static_cast<std::size_t>(world.member(0).steps()[step].from);
    const ByteSpan bytes = world.member(from).frame(step);
    return {bytes.begin(), bytes.end()};
  }

  SimulatedMembers world;
  Runs first;
};

BruckFrames begun(const Example& example) {
  BruckFrames frames(0, std::vector<std::uint32_t>(kMembers, kRanksEach), kCapacity);
  frames.begin(example.first);
  return frames;
}

TEST(frames_fuzz_mutated_frames_are_an_error_or_entries) {
  Rng random(20);
  int believed = 0;
  for (int i = 0; i < kTries / 100; ++i) {
    const Example example(random);
    for (int j = 0; j < 100; ++j) {
      BruckFrames frames = begun(example);
      const std::size_t mutated = random() % frames.steps().size();
      bool good = true;
      for (std::size_t step = 0; good && step < frames.steps().size(); ++step) {
        Frame frame = example.frame(step);
        if (step == mutated) frame = changed(frame, random);
        good = feed(frames, frame);
      }
      believed += good;
    }
  }
  // Both happen often: a flipped bit of a name is an entry, a changed size is none.
  CHECK(believed > kTries / 100);
  CHECK(believed < kTries - kTries / 10);
}

TEST(frames_fuzz_random_frames_are_an_error_or_entries) {
  Rng random(21);
  const Example example(random);
  for (int i = 0; i < kTries; ++i) {
    Frame frame(random() % 200);
    for (std::byte& byte : frame) {
      byte = static_cast<std::byte>(random() % 4 == 0 ? random() % 256 : 0);
    }
    if (frame.size() >= 24 && i % 8 != 0) {  // a valid header, so that the runs are read
      const std::uint64_t header[] = {1, 0, frame.size() - 24};
      std::memcpy(frame.data(), header, sizeof header);
    }
    BruckFrames frames = begun(example);
    feed(frames, frame);
  }
}

TEST(frames_fuzz_a_header_alone_allocates_little) {
  BruckFrames frames(0, std::vector<std::uint32_t>(2, 1'000'000), 64u << 10);
  const std::vector<std::byte> entry(8);
  Runs runs;
  runs.append({1'000'000, entry, {}});
  frames.begin(runs);
  const std::uint64_t header[] = {1, 0, 60'000'000'000};
  receive(frames, std::as_bytes(std::span(header)));
  CHECK_EQ(frames.room().size(), 64u << 10);
}

}  // namespace
}  // namespace torch_ring::test::frames_fuzz_test
