// An allreduce of private floats between two ranks of a host, and nothing else: what the hardware
// gives to a library that goes through shared memory. No agreement, no deadlines, no other dtype.
// prototype.py compiles it; collectives.py runs it in turns with the libraries.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::size_t kCount = 128u << 10;  // floats of a segment
constexpr std::size_t kSegments = 4;

struct Rank {
  alignas(128) std::atomic<std::uint64_t> staged;   // segments whose half the other may sum
  alignas(128) std::atomic<std::uint64_t> reduced;  // segments whose half this rank has summed
  alignas(4096) float slots[kSegments][kCount];
};

std::uint64_t done = 0;  // segments of the calls before this one

void wait(const std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  while (counter.load(std::memory_order_acquire) < value) __builtin_ia32_pause();
}

}  // namespace

extern "C" {

std::size_t memory_bytes() { return 2 * sizeof(Rank); }

/// Sums in place. Three stages, each a segment behind the one before: copy the half that the other
/// sums into a slot; sum one's own half, also into the slot that the other's is in; copy back what
/// the other has summed.
void allreduce(Rank* ranks, int rank, float* data, std::size_t count) {
  Rank &own = ranks[rank], &other = ranks[1 - rank];
  const std::size_t segments = (count + kCount - 1) / kCount;
  const auto slot_of = [&](Rank& whose, std::size_t i) {
    return whose.slots[(done + i) % kSegments];
  };
  const auto with_half = [&](std::size_t i, int half, auto&& access) {
    float* const begin = data + i * kCount;
    const std::size_t all = std::min(kCount, count - i * kCount);
    const std::size_t middle = all / 2;
    half == 0 ? access(begin, middle) : access(begin + middle, all - middle);
  };
  for (std::size_t i = 0; i < segments + 2; ++i) {
    if (i < segments) {
      with_half(i, 1 - rank, [&](const float* half, std::size_t floats) {
        std::memcpy(slot_of(own, i), half, floats * sizeof(float));
      });
      own.staged.store(done + i + 1, std::memory_order_release);
    }
    if (i >= 1 && i <= segments) {
      wait(other.staged, done + i);
      with_half(i - 1, rank, [&](float* half, std::size_t floats) {
        float* const slot = slot_of(other, i - 1);
#pragma GCC ivdep
        for (std::size_t k = 0; k < floats; ++k) half[k] = slot[k] = half[k] + slot[k];
      });
      own.reduced.store(done + i, std::memory_order_release);
    }
    if (i >= 2) {
      wait(other.reduced, done + i - 1);
      with_half(i - 2, 1 - rank, [&](float* half, std::size_t floats) {
        std::memcpy(half, slot_of(own, i - 2), floats * sizeof(float));
      });
    }
  }
  done += segments;
}
}
