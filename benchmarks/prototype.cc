// allreduce() and broadcast() of private floats between two ranks of a host: the hardware's limit
// for a library that uses shared memory. No agreement, no deadlines, no other dtype. prototype.py
// compiles this; collectives.py runs it in turns with the libraries.
#include <emmintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::size_t kCount = 128u << 10;  // floats of a segment
constexpr std::size_t kSegments = 4;

struct Rank {
  alignas(128) std::atomic<std::uint64_t> staged;   // segments whose half the other rank may sum
  alignas(128) std::atomic<std::uint64_t> reduced;  // segments whose half this rank has summed
  alignas(4096) float slots[kSegments][kCount];
};

std::uint64_t done = 0;  // segments of earlier calls

/// Copies past the caches, which are too small for the result.
void copy_out(float* to, const float* from, std::size_t floats) {
  std::size_t i = 0;
  for (; i + 4 <= floats; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  std::memcpy(to + i, from + i, (floats - i) * sizeof(float));
  _mm_sfence();
}

void wait(const std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  for (int i = 0; counter.load(std::memory_order_acquire) < value; ++i) {
    i < 10'000 ? __builtin_ia32_pause() : void(::sched_yield());
  }
}

}  // namespace

extern "C" {

std::size_t memory_bytes() { return 2 * sizeof(Rank); }

/// Sums in place, in three stages, each one segment behind the stage before: copy the half that the
/// other rank sums into a slot; sum the own half, also into the other rank's slot; copy back the
/// half that the other rank has summed.
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

/// Rank 0's `data` becomes rank 1's.
void broadcast(Rank* ranks, int rank, float* data, std::size_t count) {
  constexpr std::size_t kStreamed = 4u << 20;  // floats
  Rank &own = ranks[rank], &other = ranks[1 - rank];
  for (std::size_t begin = 0; begin < count; begin += kCount, ++done) {
    const std::size_t floats = std::min(kCount, count - begin);
    float* const slot = ranks[0].slots[done % kSegments];
    if (rank == 0) {
      if (done >= kSegments) wait(other.staged, done + 1 - kSegments);
      std::memcpy(slot, data + begin, floats * sizeof(float));
    } else {
      wait(other.staged, done + 1);
      count >= kStreamed ? copy_out(data + begin, slot, floats)
                         : void(std::memcpy(data + begin, slot, floats * sizeof(float)));
      // Own the cache lines just read, which makes the next write to them cheap
      // (docs/internals/measurements.md).
      for (std::size_t i = 0; i < floats; i += 16) *static_cast<volatile float*>(slot + i) = 0;
    }
    own.staged.store(done + 1, std::memory_order_release);
    own.reduced.store(done + 1, std::memory_order_release);
  }
  if (rank == 0) wait(other.staged, done);  // because an allreduce does not wait for free slots
}
}
