// SPDX-License-Identifier: Apache-2.0
#include "core/sha256.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace torch_ring {

namespace {

using Word = std::uint32_t;
using ByteSpan = std::span<const std::byte>;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<Word, 64> kConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The names of FIPS 180-4, sections 4.1.2 and 6.2.
Word choose(Word x, Word y, Word z) { return (x & y) ^ (~x & z); }
Word majority(Word x, Word y, Word z) { return (x & y) ^ (x & z) ^ (y & z); }
Word big_sigma0(Word x) { return std::rotr(x, 2) ^ std::rotr(x, 13) ^ std::rotr(x, 22); }
Word big_sigma1(Word x) { return std::rotr(x, 6) ^ std::rotr(x, 11) ^ std::rotr(x, 25); }
Word small_sigma0(Word x) { return std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3); }
Word small_sigma1(Word x) { return std::rotr(x, 17) ^ std::rotr(x, 19) ^ (x >> 10); }

/// Bytes as an integer in SHA's order, the highest byte first; and back.
Word load(const std::byte* from) {
  Word word = 0;
  for (int i = 0; i < 4; ++i) word = word << 8 | std::to_integer<Word>(from[i]);
  return word;
}

template <class Integer>
void store(Integer value, std::byte* to) {
  for (std::size_t i = sizeof value; i-- > 0; value >>= 8) to[i] = static_cast<std::byte>(value);
}

/// The hash of a message in parts.
class Hash {
 public:
  static constexpr std::size_t kBlockBytes = 64;
  using Block = std::array<std::byte, kBlockBytes>;

  void add(ByteSpan part) {
    total_bytes_ += part.size();
    while (!part.empty()) {
      const std::size_t taken = std::min(part.size(), kBlockBytes - filled_);
      std::memcpy(block_.data() + filled_, part.data(), taken);
      filled_ += taken;
      part = part.subspan(taken);
      if (filled_ == kBlockBytes) compress();
    }
  }

  /// Pads the message with a one bit, zeros and its length, and returns the digest.
  Sha256 finish() {
    const std::uint64_t bits = total_bytes_ * 8;
    block_[filled_++] = std::byte{0x80};
    if (filled_ > kBlockBytes - sizeof bits) {
      std::fill(block_.begin() + filled_, block_.end(), std::byte{0});
      compress();
    }
    std::fill(block_.begin() + filled_, block_.end(), std::byte{0});
    store(bits, block_.data() + kBlockBytes - sizeof bits);
    compress();
    Sha256 digest;
    for (std::size_t i = 0; i < state_.size(); ++i) store(state_[i], digest.data() + 4 * i);
    return digest;
  }

 private:
  /// Adds the full block to the state.
  void compress() {
    std::array<Word, 64> w;
    for (std::size_t t = 0; t < 16; ++t) w[t] = load(block_.data() + 4 * t);
    for (std::size_t t = 16; t < 64; ++t) {
      w[t] = small_sigma1(w[t - 2]) + w[t - 7] + small_sigma0(w[t - 15]) + w[t - 16];
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t t = 0; t < 64; ++t) {
      const Word t1 = h + big_sigma1(e) + choose(e, f, g) + kConstants[t] + w[t];
      const Word t2 = big_sigma0(a) + majority(a, b, c);
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<Word, 8> added = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < state_.size(); ++i) state_[i] += added[i];
    filled_ = 0;
  }

  // The first 32 bits of the fractional parts of the square roots of the first 8 primes.
  std::array<Word, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  Block block_;
  std::size_t filled_ = 0;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace

Sha256 sha256(ByteSpan message) {
  Hash hash;
  hash.add(message);
  return hash.finish();
}

Sha256 hmac_sha256(ByteSpan key, std::initializer_list<ByteSpan> message) {
  Hash::Block inner_key{};
  if (key.size() > Hash::kBlockBytes) {
    std::ranges::copy(sha256(key), inner_key.begin());
  } else {
    std::ranges::copy(key, inner_key.begin());
  }
  Hash::Block outer_key = inner_key;
  for (std::byte& byte : inner_key) byte ^= std::byte{0x36};
  for (std::byte& byte : outer_key) byte ^= std::byte{0x5c};

  Hash inner;
  inner.add(inner_key);
  for (const ByteSpan part : message) inner.add(part);
  Hash outer;
  outer.add(outer_key);
  outer.add(inner.finish());
  return outer.finish();
}

bool equal_in_constant_time(ByteSpan a, ByteSpan b) {
  if (a.size() != b.size()) return false;
  volatile unsigned difference = 0;  // volatile: the compiler may not stop at the first one
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = difference | std::to_integer<unsigned>(a[i] ^ b[i]);
  }
  return difference == 0;
}

}  // namespace torch_ring
