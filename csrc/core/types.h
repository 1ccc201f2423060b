// SPDX-License-Identifier: Apache-2.0
// DType and ReduceOp: the element types and reduction operators that every layer shares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_ring {

enum class DType : std::uint8_t {
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kComplex64,
  kComplex128,
  // The following are only moved: there is no arithmetic for them.
  kUInt16,
  kUInt32,
  kUInt64,
  kComplex32,
  kFloat8E4M3Fn,
  kFloat8E4M3FnUz,
  kFloat8E5M2,
  kFloat8E5M2FnUz,
  kFloat8E8M0FnU,
  // The sum of an Average of int64; no tensor has it.
  kInt128,
};
inline constexpr int kDTypeCount = 21;  // of tensors

/// The first numbers are Horovod's, because users may have written them down.
enum class ReduceOp : std::uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
  kBand = 6,  // bitwise, of integers; of bools: logical
  kBor = 7,
  kBxor = 8,
};
inline constexpr int kReduceOpCount = 9;

constexpr bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
}

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
    case DType::kFloat8E4M3Fn:
    case DType::kFloat8E4M3FnUz:
    case DType::kFloat8E5M2:
    case DType::kFloat8E5M2FnUz:
    case DType::kFloat8E8M0FnU:
      return 1;
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUInt32:
    case DType::kFloat32:
    case DType::kComplex32:
      return 4;
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
    case DType::kInt128:
      return 16;
  }
  return 0;
}

/// Whether reductions treat it as a floating-point number.
constexpr bool is_floating_point(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

/// Whether reductions treat it as an integer.
constexpr bool is_integer(DType dtype) { return dtype <= DType::kInt64; }

/// Whether reductions treat it as two floating-point numbers.
constexpr bool is_complex(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

/// The dtype of an element's real and imaginary part, or of the element itself.
constexpr DType part_of(DType dtype) {
  if (dtype == DType::kComplex64) return DType::kFloat32;
  return dtype == DType::kComplex128 ? DType::kFloat64 : dtype;
}

/// The number of parts of an element.
constexpr std::size_t parts_of(DType dtype) { return is_complex(dtype) ? 2 : 1; }

/// Whether there is arithmetic for a reduction. Complex numbers have no order, and their product is
/// not that of their parts. Bitwise operators need integers or bools.
constexpr bool can_reduce(DType dtype, ReduceOp op) {
  if (is_bitwise(op)) return is_integer(dtype) || dtype == DType::kBool;
  if (is_complex(dtype)) return op == ReduceOp::kSum || op == ReduceOp::kAverage;
  return dtype <= DType::kBool;
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {
      "uint8",         "int8",          "int16",           "int32",       "int64",
      "float16",       "bfloat16",      "float32",         "float64",     "bool",
      "complex64",     "complex128",    "uint16",          "uint32",      "uint64",
      "complex32",     "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
      "float8_e8m0fnu"};
  const auto index = static_cast<std::size_t>(dtype);
  return index < kDTypeCount ? kNames[index] : "unknown dtype";
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"Average", "Sum",  "Adasum", "Min", "Max",
                                    "Product", "Band", "Bor",    "Bxor"};
  const auto index = static_cast<std::size_t>(op);
  return index < kReduceOpCount ? kNames[index] : "unknown op";
}

}  // namespace torch_ring
