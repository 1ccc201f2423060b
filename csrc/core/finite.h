// worst_of(): whether all of some floating-point numbers are finite.
//
// One pass with three integer instructions a vector, so that it runs at the speed of the memory: a
// number whose magnitude is above a limit carries into the sign bit when what is left above that
// limit is added.
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
/// rounded toward zero if the dtype does not have it; infinity: there is none. Float16 has no limit
/// but its own.
Worst worst_of(const void* data, std::size_t count, DType dtype, double limit);

}  // namespace torch_ring
