// SPDX-License-Identifier: Apache-2.0
// worst_of(): whether all floating-point numbers of an array are finite.
//
// One pass with three integer instructions a vector, so that it runs at the speed of the memory:
// adding the distance between the limit and the largest bits makes every magnitude above the limit
// carry into the sign bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace torch_ring {

/// The worst of some numbers; a later one is worse.
enum class Worst : std::uint8_t {
  kFinite,
  kLarge,  // a magnitude above the limit
  kInfinite,
  kNaN,
};

/// The worst of `count` numbers; a complex one counts as its two parts. `limit`: positive, and
/// rounded toward zero if the dtype does not have it; infinity for none. Float16 ignores it.
Worst worst_of(const void* data, std::size_t count, DType dtype, double limit);

}  // namespace torch_ring
