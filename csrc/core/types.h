// DType and ReduceOp: the element types and reduction operators that every layer shares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_ring {

enum class DType : std::uint8_t {
  kUInt8,
  kInt8,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
};
inline constexpr int kDTypeCount = 9;

/// The numbers are Horovod's, because users may have written them down.
enum class ReduceOp : std::uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

constexpr bool is_floating_point(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"uint8",    "int8",    "int32",   "int64", "float16",
                                    "bfloat16", "float32", "float64", "bool"};
  const auto index = static_cast<std::size_t>(dtype);
  return index < kDTypeCount ? kNames[index] : "unknown dtype";
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  const auto index = static_cast<std::size_t>(op);
  return index < 6 ? kNames[index] : "unknown op";
}

}  // namespace torch_ring
