// SPDX-License-Identifier: Apache-2.0
// kEmulated: whether the tests run under an emulator of another processor.
#pragma once

namespace torch_ring::test {

#if defined(TORCH_RING_EMULATED)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

}  // namespace torch_ring::test
