// SPDX-License-Identifier: Apache-2.0
#include "bindings/dtypes.h"

#include <array>

#include "core/error.h"

namespace torch_ring {

namespace {

// In the order of DType.
constexpr std::array<at::ScalarType, kDTypeCount> kScalarTypes{
    at::kByte,          at::kChar,
    at::kShort,         at::kInt,
    at::kLong,          at::kHalf,
    at::kBFloat16,      at::kFloat,
    at::kDouble,        at::kBool,
    at::kComplexFloat,  at::kComplexDouble,
    at::kUInt16,        at::kUInt32,
    at::kUInt64,        at::kComplexHalf,
    at::kFloat8_e4m3fn, at::kFloat8_e4m3fnuz,
    at::kFloat8_e5m2,   at::kFloat8_e5m2fnuz,
    at::kFloat8_e8m0fnu};

constexpr int kUnknown = -1;

// By torch's number: the DType's number, or kUnknown.
constexpr auto kDTypes = [] {
  std::array<int, static_cast<std::size_t>(at::ScalarType::NumOptions)> dtypes{};
  dtypes.fill(kUnknown);
  for (std::size_t i = 0; i < kScalarTypes.size(); ++i) {
    dtypes[static_cast<std::size_t>(kScalarTypes[i])] = static_cast<int>(i);
  }
  return dtypes;
}();

/// The names of the dtypes for which `holds(dtype)`: "int8, int32 and bool".
template <class Holds>
std::string names_of(Holds&& holds) {
  std::string text;
  std::string last;
  for (int i = 0; i < kDTypeCount; ++i) {
    if (!holds(static_cast<DType>(i))) continue;
    if (!last.empty()) text += (text.empty() ? "" : ", ") + last;
    last = name_of(static_cast<DType>(i));
  }
  return text.empty() ? last : text + " and " + last;
}

bool is_moved_only(DType dtype) { return !can_reduce(dtype, ReduceOp::kSum); }

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  const auto type = static_cast<std::size_t>(tensor.scalar_type());
  const int dtype = type < kDTypes.size() ? kDTypes[type] : kUnknown;
  if (dtype == kUnknown) {
    throw Error(ErrorKind::kInvalidArgument,
                "dtype " + std::string(c10::getDtypeNames(tensor.scalar_type()).first) +
                    " is not supported: use " + names_of([](DType) { return true; }) +
                    ", as by tensor.to() or tensor.view()");
  }
  return static_cast<DType>(dtype);
}

at::ScalarType scalar_type_of(DType dtype) {
  return kScalarTypes.at(static_cast<std::size_t>(dtype));
}

void check_reducible(DType dtype, ReduceOp op, const std::string& what) {
  if (dtype == DType::kBool && (op == ReduceOp::kAverage || op == ReduceOp::kSum)) {
    throw Error(ErrorKind::kInvalidArgument,
                what + ": bool tensors take Min, Max, Product, Band, Bor and Bxor, not " +
                    name_of(op) + ": for counts and shares, convert to an integer or a float");
  }
  if (can_reduce(dtype, op)) return;
  if (is_bitwise(op)) {
    throw Error(ErrorKind::kInvalidArgument,
                what + ": there is no " + name_of(op) + " of " + name_of(dtype) +
                    ": Band, Bor and Bxor take " +
                    names_of([](DType each) { return can_reduce(each, ReduceOp::kBand); }));
  }
  const auto reduces = [](DType each) { return !is_complex(each) && !is_moved_only(each); };
  throw Error(ErrorKind::kInvalidArgument,
              what + ": there is no " + name_of(op) + " of " + name_of(dtype) +
                  ": reductions take " + names_of(reduces) + ", and Sum and Average also " +
                  names_of(is_complex) + "; " + names_of(is_moved_only) +
                  " are only moved, by broadcast, allgather and alltoall");
}

}  // namespace torch_ring
