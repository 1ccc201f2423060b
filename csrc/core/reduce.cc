// SPDX-License-Identifier: Apache-2.0
#include "core/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/half.h"

namespace torch_ring {

namespace {

// Elements of a block: intermediate results between two loops stay in the first-level cache.
constexpr std::size_t kBlock = 1024;
constexpr std::size_t kScratchBytes = kBlock * size_of(DType::kInt128);

template <class T>
constexpr bool kConverts = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

template <class T>
using PartialOf = std::conditional_t<kConverts<T>, float, T>;

using Int128 = __int128;

/// The dtype of an Average's sum of integers.
template <class T>
using WideOf = std::conditional_t<(sizeof(T) < 4), std::int32_t,
                                  std::conditional_t<sizeof(T) == 4, std::int64_t, Int128>>;

/// The loops for one dtype, operator and instruction set. Some dtypes do not need all of them.
struct Kernels {
  void (*load)(void* out, const void* input, std::size_t count, double prescale);
  void (*fold)(void* out, const void* partial, const void* input, std::size_t count);
  void (*combine)(void* out, const void* partial, const void* other, std::size_t count);
  void (*scale)(void* out, const void* partial, std::size_t count, const Scaling& scaling);
  void (*store)(void* out, const void* partial, std::size_t count);  // null: nothing to convert
  // The whole reduction in one loop, for two inputs and one or two outputs, without an intermediate
  // block. Each element sees the same operations, so the bits are the same. Not for scaled
  // integers.
  void (*reduce_two)(std::span<void* const> outputs, const void* first, const void* second,
                     std::size_t count, const Scaling& scaling);
};

namespace baseline {
struct Lanes {  // one lane; the compiler vectorises where it can
  static constexpr std::size_t kCount = 1;
  using Vector = float;
  static Vector all(float value) { return value; }
  template <class T>
  static Vector load(const T* from) {
    return to_float(*from);
  }
  static void store(BFloat16* to, Vector value) { *to = to_bfloat16(value); }
  static void store(Float16* to, Vector value) { *to = to_float16(value); }
  // Never called with one lane; the kernels name them.
  struct Pair {
    Vector even, odd;
  };
  static Pair load_pair(const BFloat16* from);
  static void store_pair(BFloat16* to, Pair value);
};
#include "core/reduce_kernels.inc"
}  // namespace baseline

// Other processors, other compilers and sanitizers make do with the baseline.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(TORCH_RING_SANITIZED)
#define TORCH_RING_DISPATCH
#include <immintrin.h>
// GCC 12 warns of variables that its own header leaves undefined on purpose (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "core/lanes_avx2.inc"
#include "core/reduce_kernels.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#include "core/lanes_avx512.inc"
#include "core/reduce_kernels.inc"
}  // namespace avx512
#pragma GCC pop_options
#endif

Kernels kernels_for(const Reduction& reduction) {
#if defined(TORCH_RING_DISPATCH)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512::kernels_of(reduction);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return avx2::kernels_of(reduction);
  }
#endif
  return baseline::kernels_of(reduction);
}

/// The stages of a block. Each stage takes the address of the elements and returns the address of
/// its results, which is the same if it had nothing to do.
class Block {
 public:
  explicit Block(const Reduction& reduction)
      : reduction_(reduction), kernels_(kernels_for(reduction)) {}

  /// Runs the whole reduction in one loop and returns true, if it has two inputs, one or two
  /// outputs, and at most a floating-point scaling at the end.
  bool at_once(std::span<void* const> outputs, std::span<const void* const> inputs,
               std::size_t count) const {
    if (inputs.size() != 2 || outputs.size() > 2) return false;
    const bool scales_integers = is_scaled() && !is_floating_point(reduction_.dtype);
    if (!is_bool() && (reduction_.scaling.prescale != 1.0 || scales_integers)) return false;
    kernels_.reduce_two(outputs, inputs[0], inputs[1], count, reduction_.scaling);
    return true;
  }

  /// The reduction of the inputs' elements [begin, begin + count).
  const void* reduced(std::span<const void* const> inputs, std::size_t begin, std::size_t count) {
    const double prescale = is_bool() ? 1.0 : reduction_.scaling.prescale;
    const std::size_t offset = begin * size_of(reduction_.dtype);
    const auto input = [&](std::size_t i) { return static_cast<const char*>(inputs[i]) + offset; };

    const void* held = input(0);
    if (prescale != 1.0 || kernels_.store != nullptr) {
      kernels_.load(partial_, held, count, prescale);
      held = partial_;
    }
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      if (prescale == 1.0) {
        kernels_.fold(partial_, held, input(i), count);
      } else {  // two loops: no instruction set may fuse the product and the sum
        kernels_.load(other_, input(i), count, prescale);
        kernels_.combine(partial_, held, other_, count);
      }
      held = partial_;
    }
    return held;
  }

  const void* finished(const void* held, std::size_t count) {
    if (!is_bool() && is_scaled()) {
      kernels_.scale(partial_, held, count, reduction_.scaling);
      held = partial_;
    }
    if (kernels_.store != nullptr) {
      kernels_.store(other_, held, count);
      held = other_;
    }
    return held;
  }

 private:
  bool is_bool() const { return reduction_.dtype == DType::kBool; }
  bool is_scaled() const {
    return reduction_.scaling.postscale != 1.0 || reduction_.scaling.divisor != 1;
  }

  const Reduction& reduction_;
  const Kernels kernels_;
  alignas(64) std::byte partial_[kScratchBytes];
  alignas(64) std::byte other_[kScratchBytes];
};

template <class Fn>
void for_blocks(std::size_t count, Fn&& fn) {
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    fn(begin, std::min(kBlock, count - begin));
  }
}

/// Sets every element to the identity of `op`; 16-bit floats are given as their bits.
template <class T>
void fill(void* data, std::size_t count, ReduceOp op, T one, T lowest, T highest) {
  const T value = op == ReduceOp::kProduct ? one
                  : op == ReduceOp::kMin   ? highest
                  : op == ReduceOp::kMax   ? lowest
                                           : T{};
  std::fill_n(static_cast<T*>(data), count, value);
}

template <class T>
void fill(void* data, std::size_t count, ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  if (op == ReduceOp::kBand) {
    std::fill_n(static_cast<T*>(data), count, static_cast<T>(-1));  // all bits; of a bool: true
  } else if constexpr (Limits::has_infinity) {
    fill<T>(data, count, op, 1, -Limits::infinity(), Limits::infinity());
  } else {
    fill<T>(data, count, op, 1, Limits::lowest(), Limits::max());
  }
}

void copy_to_all(std::span<void* const> outputs, std::size_t offset, const void* from,
                 std::size_t bytes) {
  for (void* const output : outputs) {
    char* const to = static_cast<char*>(output) + offset;
    if (to != from) std::memcpy(to, from, bytes);
  }
}

/// The reduction of the parts of complex numbers.
Reduction of_parts(const Reduction& reduction) {
  return {part_of(reduction.dtype), reduction.op, reduction.scaling};
}

}  // namespace

void reduce(std::span<void* const> outputs, std::span<const void* const> inputs, std::size_t count,
            const Reduction& reduction) {
  if (is_complex(reduction.dtype)) return reduce(outputs, inputs, 2 * count, of_parts(reduction));
  const std::size_t item = size_of(reduction.dtype);
  Block block(reduction);
  if (block.at_once(outputs, inputs, count)) return;
  for_blocks(count, [&](std::size_t begin, std::size_t part) {
    const void* const result = block.finished(block.reduced(inputs, begin, part), part);
    copy_to_all(outputs, begin * item, result, part * item);
  });
}

void reduce_partial(void* partial, std::span<const void* const> inputs, std::size_t count,
                    const Reduction& reduction) {
  if (is_complex(reduction.dtype)) {
    return reduce_partial(partial, inputs, 2 * count, of_parts(reduction));
  }
  const std::size_t item = size_of(accumulation_dtype(reduction));
  Block block(reduction);
  for_blocks(count, [&](std::size_t begin, std::size_t part) {
    const void* const result = block.reduced(inputs, begin, part);
    copy_to_all({&partial, 1}, begin * item, result, part * item);
  });
}

void combine_partial(void* partial, const void* other, std::size_t count,
                     const Reduction& reduction) {
  if (is_complex(reduction.dtype)) {
    return combine_partial(partial, other, 2 * count, of_parts(reduction));
  }
  kernels_for(reduction).combine(partial, partial, other, count);
}

void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kUInt8:
      return fill<std::uint8_t>(data, count, op);
    case DType::kInt8:
      return fill<std::int8_t>(data, count, op);
    case DType::kInt16:
      return fill<std::int16_t>(data, count, op);
    case DType::kInt32:
      return fill<std::int32_t>(data, count, op);
    case DType::kInt64:
      return fill<std::int64_t>(data, count, op);
    case DType::kFloat16:
      return fill<std::uint16_t>(data, count, op, 0x3C00, 0xFC00, 0x7C00);
    case DType::kBFloat16:
      return fill<std::uint16_t>(data, count, op, 0x3F80, 0xFF80, 0x7F80);
    case DType::kFloat32:
      return fill<float>(data, count, op);
    case DType::kFloat64:
      return fill<double>(data, count, op);
    case DType::kBool:
      return fill<bool>(data, count, op);
    case DType::kComplex64:
    case DType::kComplex128:
      return fill_identity(data, 2 * count, part_of(dtype), op);
    default:  // no reduction
      break;
  }
}

void finish_partial(std::span<void* const> outputs, const void* partial, std::size_t count,
                    const Reduction& reduction) {
  if (is_complex(reduction.dtype)) {
    return finish_partial(outputs, partial, 2 * count, of_parts(reduction));
  }
  const std::size_t item = size_of(reduction.dtype);
  const std::size_t partial_item = size_of(accumulation_dtype(reduction));
  Block block(reduction);
  for_blocks(count, [&](std::size_t begin, std::size_t part) {
    const char* const held = static_cast<const char*>(partial) + begin * partial_item;
    copy_to_all(outputs, begin * item, block.finished(held, part), part * item);
  });
}

}  // namespace torch_ring
