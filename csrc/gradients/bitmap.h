// SPDX-License-Identifier: Apache-2.0
// Bitmap: some of an optimizer's parameters, by their indices.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>
#include <utility>

namespace torch_ring {

/// A set of parameters. In Python an int, of which bit i is parameter i.
class Bitmap {
 public:
  Bitmap() = default;
  /// Of bytes(), with or without zeros at the end.
  explicit Bitmap(std::string bytes) : bytes_(std::move(bytes)) { trim(); }

  bool get(std::size_t i) const {
    return i / 8 < bytes_.size() && (static_cast<unsigned char>(bytes_[i / 8]) >> (i % 8) & 1) != 0;
  }
  void set(std::size_t i) {
    if (i / 8 >= bytes_.size()) bytes_.resize(i / 8 + 1);
    bytes_[i / 8] = static_cast<char>(bytes_[i / 8] | (1 << (i % 8)));
  }

  bool any() const { return !bytes_.empty(); }
  std::size_t count() const {
    std::size_t bits = 0;
    for (const char byte : bytes_) {
      bits += static_cast<std::size_t>(std::popcount(static_cast<unsigned char>(byte)));
    }
    return bits;
  }

  Bitmap& operator|=(const Bitmap& other) {
    bytes_.resize(std::max(bytes_.size(), other.bytes_.size()));
    for (std::size_t i = 0; i < other.bytes_.size(); ++i) {
      bytes_[i] = static_cast<char>(bytes_[i] | other.bytes_[i]);
    }
    return *this;
  }
  /// Takes the parameters of `other` out.
  Bitmap& operator-=(const Bitmap& other) {
    for (std::size_t i = 0; i < std::min(bytes_.size(), other.bytes_.size()); ++i) {
      bytes_[i] = static_cast<char>(bytes_[i] & ~other.bytes_[i]);
    }
    trim();
    return *this;
  }
  friend Bitmap operator-(Bitmap one, const Bitmap& other) { return one -= other; }
  friend Bitmap operator&(const Bitmap& one, const Bitmap& other) { return one - (one - other); }
  bool operator==(const Bitmap&) const = default;

  /// Bit i % 8 of byte i / 8 is parameter i; the last byte is not zero.
  const std::string& bytes() const { return bytes_; }

 private:
  void trim() { bytes_.resize(bytes_.find_last_not_of('\0') + 1); }

  std::string bytes_;
};

}  // namespace torch_ring
