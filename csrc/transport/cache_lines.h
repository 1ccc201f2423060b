// Which core a cache line of shared memory belongs to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_ring {

inline constexpr std::size_t kCacheLine = 64;

/// Makes the lines of what this rank has read its own, by writing a byte of each. Call it before
/// telling the writer that the memory is free, as the only reader of [data, data + bytes).
///
/// A core that writes lines which lie in another core's cache too must take them one after the
/// other; lines that it has lost it fetches many at a time. On two cores that share no cache this
/// is 2 and 20 GB/s (csrc/README.md).
inline void take_over(std::byte* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  for (std::uintptr_t at = begin; at < begin + bytes; at = (at / kCacheLine + 1) * kCacheLine) {
    *reinterpret_cast<volatile std::byte*>(at) = std::byte{0};
  }
}

}  // namespace torch_ring
