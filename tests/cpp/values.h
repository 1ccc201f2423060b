// SPDX-License-Identifier: Apache-2.0
// value_at() and bytes_of(): data in closed form, so every rank can compute the others' data.
#pragma once

#include <algorithm>
#include <array>

#include "elements.h"

namespace torch_ring::test {

constexpr std::array kOps{ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

constexpr int kNumberCount = 10;  // dtypes of numbers and booleans, which precede the others

constexpr std::size_t kPeriod = 25 * 3;  // of value_at(i, ...), for every op

/// Element i on rank r: i * size + r, modulo a number so small that results of few ranks fit every
/// dtype, and those of 16 ranks all but the bytes.
inline double value_at(std::size_t i, int rank, int size, ReduceOp op) {
  const std::size_t value = i * static_cast<std::size_t>(size) + static_cast<std::size_t>(rank);
  return op == ReduceOp::kProduct ? 1.0 + static_cast<double>(value % 3)
                                  : static_cast<double>(value % 25);
}

/// The reduction of element i over the ranks; bytes wrap around.
inline double reduced_at(std::size_t i, int size, ReduceOp op, DType dtype) {
  const auto value = [&](int rank) {
    const double number = value_at(i, rank, size, op);
    return dtype == DType::kBool ? static_cast<double>(number != 0) : number;
  };
  double result = value(0);
  for (int rank = 1; rank < size; ++rank) {
    if (op == ReduceOp::kSum) result += value(rank);
    if (op == ReduceOp::kProduct) result *= value(rank);
    if (op == ReduceOp::kMin) result = std::min(result, value(rank));
    if (op == ReduceOp::kMax) result = std::max(result, value(rank));
  }
  if (dtype == DType::kBool) return static_cast<double>(result != 0);
  if (dtype == DType::kUInt8) return static_cast<std::uint8_t>(static_cast<int>(result));
  if (dtype == DType::kInt8) return static_cast<std::int8_t>(static_cast<int>(result));
  return result;
}

/// Bytes that differ by rank and by index.
inline Bytes bytes_of(int rank, std::size_t count) {
  return Elements::repeating(
             DType::kUInt8, count, 251,
             [&](std::size_t i) {
               return static_cast<double>((i + 50 * static_cast<std::size_t>(rank)) % 251);
             })
      .bytes();
}

}  // namespace torch_ring::test
