// SPDX-License-Identifier: Apache-2.0
// crc32c(): the CRC-32C of bytes, by the processor's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_ring {

/// Castagnoli's cyclic redundancy check (iSCSI, RFC 3720), which finds every error of up to three
/// bits in 256 KiB, and every burst of up to 32. `before`: the CRC of the preceding bytes, so that
/// crc32c(b, crc32c(a)) is the CRC of a followed by b.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

/// The same by a table, for processors without the instruction.
std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace torch_ring
