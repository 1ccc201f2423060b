#include "core/reduce.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "core/half.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace torch_ring {

namespace {

// Lines that another core will read are streamed past the cache from this size on: below it they
// are read before they would have left the writer's cache anyway, and DESIGN.md's decision 5 has
// measured plain stores to be faster there.
constexpr std::size_t kStreamingBytes = 32u << 10;

/// A boolean of a tensor: one byte, 0 or 1.
enum class Bool : std::uint8_t {};
constexpr std::uint8_t operator|(Bool a, Bool b) {
  return static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b);
}
constexpr std::uint8_t operator&(Bool a, Bool b) {
  return static_cast<std::uint8_t>(a) & static_cast<std::uint8_t>(b);
}

template <class T>
using PartialOf =
    std::conditional_t<std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>, float, T>;

using Copy = void (*)(void* to, const void* from, std::size_t bytes);

void copy_plain(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

/// Stores past the cache; end_stream() makes them visible before later stores.
void copy_past_cache(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__)
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(target) % 64) % 64;
  if (bytes < head + 64) {
    std::memcpy(target, source, bytes);
    return;
  }
  std::memcpy(target, source, head);
  std::size_t at = head;
  for (; at + 64 <= bytes; at += 64) {  // whole lines, so that no line is read first
    const auto* lines = reinterpret_cast<const __m128i*>(source + at);
    auto* stream = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(lines);
    const __m128i b = _mm_loadu_si128(lines + 1);
    const __m128i c = _mm_loadu_si128(lines + 2);
    const __m128i d = _mm_loadu_si128(lines + 3);
    _mm_stream_si128(stream, a);
    _mm_stream_si128(stream + 1, b);
    _mm_stream_si128(stream + 2, c);
    _mm_stream_si128(stream + 3, d);
  }
  std::memcpy(target + at, source + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

struct Job {
  std::span<void* const> outputs;       // empty: the result stays in `partial`
  std::span<const void* const> inputs;  // empty: the result comes from `partial`
  void* partial;                        // null: blocks of scratch
  const void* other;                    // null, or a second partial to combine with
  std::size_t count;
  DType dtype;
  ReduceOp op;
  Scaling scaling;
  Copy copy;

  bool scales() const { return scaling.postscale != 1.0 || scaling.divisor != 1; }
};

namespace baseline {
#include "core/reduce_kernels.inc"
}  // namespace baseline

// Sanitizers and other compilers make do with the baseline.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(TORCH_RING_SANITIZED)
#define TORCH_RING_DISPATCH

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "core/reduce_kernels.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#include "core/reduce_kernels.inc"
}  // namespace avx512
#pragma GCC pop_options
#endif

void run(const Job& job) {
#if defined(TORCH_RING_DISPATCH)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512::run_dtype(job);
  }
  if (__builtin_cpu_supports("avx2")) return avx2::run_dtype(job);
#endif
  baseline::run_dtype(job);
}

}  // namespace

void reduce(std::span<void* const> outputs, std::span<const void* const> inputs, std::size_t count,
            const Reduction& reduction, bool streaming) {
  const bool past_cache = streaming && count * size_of(reduction.dtype) >= kStreamingBytes;
  run({outputs, inputs, nullptr, nullptr, count, reduction.dtype, reduction.op, reduction.scaling,
       past_cache ? copy_past_cache : copy_plain});
  if (past_cache) end_stream();
}

void reduce_partial(void* partial, std::span<const void* const> inputs, std::size_t count,
                    const Reduction& reduction) {
  run({{}, inputs, partial, nullptr, count, reduction.dtype, reduction.op, reduction.scaling,
       copy_plain});
}

void combine_partial(void* partial, const void* other, std::size_t count,
                     const Reduction& reduction) {
  run({{}, {}, partial, other, count, reduction.dtype, reduction.op, reduction.scaling,
       copy_plain});
}

void finish_partial(std::span<void* const> outputs, const void* partial, std::size_t count,
                    const Reduction& reduction) {
  // Not written to: the scaled values go through scratch.
  run({outputs, {}, const_cast<void*>(partial), nullptr, count, reduction.dtype, reduction.op,
       reduction.scaling, copy_plain});
}

void copy_streaming(void* to, const void* from, std::size_t bytes) {
  if (bytes < kStreamingBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  copy_past_cache(to, from, bytes);
  end_stream();
}

}  // namespace torch_ring
