// SPDX-License-Identifier: Apache-2.0
// bytes_of(): memory as bytes, for arithmetic on addresses.
#pragma once

#include <cstddef>

namespace torch_ring {

inline std::byte* bytes_of(void* data) { return static_cast<std::byte*>(data); }
inline const std::byte* bytes_of(const void* data) { return static_cast<const std::byte*>(data); }

}  // namespace torch_ring
