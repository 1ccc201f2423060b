// SPDX-License-Identifier: Apache-2.0
#include "core/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define TORCH_RING_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define TORCH_RING_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace torch_ring {

namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // the bits of 0x1EDC6F41 in reverse

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kTable = make_table();

#if defined(TORCH_RING_CRC_TARGET)
TORCH_RING_CRC_TARGET std::uint32_t next(std::uint32_t crc, std::uint64_t word) {
#if defined(__x86_64__)
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

TORCH_RING_CRC_TARGET std::uint32_t next(std::uint32_t crc, std::uint8_t byte) {
#if defined(__x86_64__)
  return _mm_crc32_u8(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
}

TORCH_RING_CRC_TARGET std::uint32_t by_instruction(std::span<const std::byte> bytes,
                                                   std::uint32_t crc) {
  std::size_t done = 0;
  for (; bytes.size() - done >= sizeof(std::uint64_t); done += sizeof(std::uint64_t)) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + done, sizeof word);
    crc = next(crc, word);
  }
  for (; done < bytes.size(); ++done) crc = next(crc, static_cast<std::uint8_t>(bytes[done]));
  return crc;
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#else
  return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}
#endif

}  // namespace

std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc = crc >> 8 ^ kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xFF];
  }
  return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
#if defined(TORCH_RING_CRC_TARGET)
  static const bool kHasInstruction = has_instruction();
  if (kHasInstruction) return ~by_instruction(bytes, ~before);
#endif
  return crc32c_by_table(bytes, before);
}

}  // namespace torch_ring
