// SPDX-License-Identifier: Apache-2.0
// fuzz() and mutate(): many broken inputs, the same in every run.
//
//   fuzz(1000, [&](Rng& rng) { check_that_it_refuses_or_reads(mutate(valid, rng)); });
//
// A failure names the case, and case i always uses Rng(i).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "harness.h"

namespace torch_ring::test {

using Rng = std::mt19937_64;

/// A number below `end`, which is not 0. The standard's distributions differ between libraries.
inline std::size_t below(std::size_t end, Rng& rng) { return rng() % end; }

inline std::vector<std::byte> random_bytes(std::size_t count, Rng& rng) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
  return bytes;
}

/// An integer at which a size, a count or an index may overflow.
inline std::uint64_t boundary(Rng& rng) {
  const std::uint64_t power = std::uint64_t{1} << below(64, rng);
  return power + below(3, rng) - 1;
}

/// One change to `bytes`.
inline void mutate_once(std::vector<std::byte>& bytes, Rng& rng) {
  const auto place = [&] { return static_cast<std::ptrdiff_t>(below(bytes.size() + 1, rng)); };
  std::ptrdiff_t begin = place();
  std::ptrdiff_t end = std::min<std::ptrdiff_t>(place(), begin + 64);
  if (begin > end) std::swap(begin, end);
  switch (bytes.empty() ? 0 : below(6, rng)) {
    case 0: {
      const auto inserted = random_bytes(1 + below(16, rng), rng);
      bytes.insert(bytes.begin() + begin, inserted.begin(), inserted.end());
      break;
    }
    case 1:
      bytes.erase(bytes.begin() + begin, bytes.begin() + end);
      break;
    case 2:
      bytes.resize(below(bytes.size(), rng));
      break;
    case 3: {
      const std::vector<std::byte> again(bytes.begin() + begin, bytes.begin() + end);
      bytes.insert(bytes.begin() + place(), again.begin(), again.end());
      break;
    }
    case 4:
      bytes[below(bytes.size(), rng)] ^= std::byte{1} << static_cast<int>(below(8, rng));
      break;
    default: {  // an aligned integer of one to eight bytes
      const std::uint64_t value = boundary(rng);
      const std::size_t width = std::size_t{1} << below(4, rng);
      const std::size_t at = below(bytes.size(), rng) / width * width;
      std::memcpy(bytes.data() + at, &value, std::min(width, bytes.size() - at));
    }
  }
}

/// `bytes` with one to four changes. The result has no spare capacity, so AddressSanitizer sees a
/// read beyond it.
inline std::vector<std::byte> mutate(std::vector<std::byte> bytes, Rng& rng) {
  for (std::size_t changes = 1 + below(4, rng); changes > 0; --changes) mutate_once(bytes, rng);
  return {bytes.begin(), bytes.end()};
}

/// Runs one(rng) for each case.
template <class One>
void fuzz(std::uint64_t cases, One&& one) {
  for (std::uint64_t i = 0; i < cases; ++i) {
    Rng rng(i);
    try {
      one(rng);
    } catch (const std::exception& error) {
      throw CheckFailed("case " + std::to_string(i) + ": " + error.what());
    }
  }
}

}  // namespace torch_ring::test
