// SPDX-License-Identifier: Apache-2.0
// own_cache_lines() and copy_nontemporal(): cache-line ownership and non-temporal copies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace torch_ring {

inline constexpr std::size_t kCacheLine = 64;

/// Moves the cache lines of [data, data + bytes) into this core's ownership by writing a byte of
/// each, so the contents are lost. Call it as their only reader, before the writer is told that the
/// memory is free.
///
/// A core that writes lines shared with another core's cache makes them exclusive one at a time; it
/// fetches lines that another core owns many at a time. On two cores without a common cache that is
/// 2 GB/s against 20 GB/s (docs/internals/measurements.md).
inline void own_cache_lines(std::byte* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  for (std::uintptr_t at = begin; at < begin + bytes; at = (at / kCacheLine + 1) * kCacheLine) {
    *reinterpret_cast<volatile std::byte*>(at) = std::byte{0};
  }
}

/// memcpy past the caches (on x86-64): target lines are not fetched before they are overwritten,
/// and the caches keep their contents. For results too large to stay in a cache until they are
/// read.
inline void copy_nontemporal(void* to, const void* from, std::size_t bytes) {
#if defined(__SSE2__) && !defined(TORCH_RING_SANITIZED)  // sanitizers do not see such stores
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % kCacheLine;
  const std::size_t head = std::min(bytes, misaligned == 0 ? 0 : kCacheLine - misaligned);
  std::memcpy(target, source, head);
  std::size_t at = head;
  for (; at + kCacheLine <= bytes; at += kCacheLine) {
    __m128i line[4];
    std::memcpy(line, source + at, kCacheLine);
    auto* const lines = reinterpret_cast<__m128i*>(target + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(lines + i, line[i]);
  }
  std::memcpy(target + at, source + at, bytes - at);
  _mm_sfence();  // orders these stores before all later ones
#else
  std::memcpy(to, from, bytes);
#endif
}

/// Whether a result is written past the caches, because it exceeds a core's share of them.
constexpr bool is_nontemporal(std::size_t bytes) { return bytes >= 16u << 20; }

/// Copies a part of a result, past the caches if `nontemporal`.
inline void copy_part(void* to, const void* from, std::size_t bytes, bool nontemporal) {
  if (nontemporal) {
    copy_nontemporal(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace torch_ring
