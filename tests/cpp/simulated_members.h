// SPDX-License-Identifier: Apache-2.0
// SimulatedMembers: the members of an allgather of entries in one thread, with their frames moved
// by hand.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collective/frames.h"
#include "core/at.h"
#include "harness.h"

namespace torch_ring::test {

/// Hands `bytes` to `frames` like a connection: as many at a time as there is room for.
inline void receive(BruckFrames& frames, ByteSpan bytes) {
  while (!bytes.empty() && !frames.complete()) {
    const std::span<std::byte> room = frames.room();
    const std::size_t count = std::min(room.size(), bytes.size());
    std::copy_n(bytes.begin(), count, room.begin());
    frames.absorb(count);
    bytes = bytes.subspan(count);
  }
}

class SimulatedMembers {
 public:
  /// The frames and bytes sent by one member in one round.
  struct Sent {
    std::size_t frames = 0;
    std::size_t bytes = 0;
  };

  SimulatedMembers(int members, int ranks_each, std::size_t capacity = 64u << 10)
      : ranks_each_(static_cast<std::size_t>(ranks_each)) {
    const std::vector<std::uint32_t> ranks(static_cast<std::size_t>(members),
                                           static_cast<std::uint32_t>(ranks_each));
    for (int member = 0; member < members; ++member) {
      frames_.push_back(std::make_unique<BruckFrames>(member, ranks, capacity));
    }
  }

  /// Runs a round; `common[rank]` and, if there are any, `own[rank]` are posted. Returns the
  /// maximum over the members.
  Sent round(const std::vector<ByteSpan>& common, const std::vector<ByteSpan>& own = {}) {
    for (std::size_t member = 0; member < frames_.size(); ++member) {
      Runs runs;
      for (std::size_t i = 0; i < ranks_each_; ++i) {
        const std::size_t rank = member * ranks_each_ + i;
        runs.append({1, common[rank], own.empty() ? ByteSpan{} : own[rank]});
      }
      frames_[member]->begin(runs);
    }
    // All members take the same number of steps.
    const std::size_t steps = frames_.front()->steps().size();
    for (std::size_t step = 0; step < steps; ++step) {
      for (const auto& to : frames_) {
        receive(*to, at(frames_, to->steps()[step].from)->frame(step));
        CHECK_EQ(to->due(), step + 1);
      }
    }
    Sent most;
    for (const auto& member : frames_) {
      CHECK(member->complete());
      std::size_t bytes = 0;
      for (std::size_t step = 0; step < steps; ++step) bytes += member->frame(step).size();
      most = {steps, std::max(most.bytes, bytes)};
    }
    return most;
  }

  const BruckFrames& member(std::size_t member) const { return *frames_[member]; }
  std::size_t count() const { return frames_.size(); }

 private:
  const std::size_t ranks_each_;
  std::vector<std::unique_ptr<BruckFrames>> frames_;
};

}  // namespace torch_ring::test
