// SPDX-License-Identifier: Apache-2.0
// SHA-256 and HMAC-SHA256: proofs that the other end of a connection knows a key.
//
// They are our own because the core links no library that has them, and Python's hashlib needs the
// GIL, for which the control plane's thread must not wait. They hash a few hundred bytes per
// connection, so the code is simple and not fast.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>

namespace torch_ring {

using Sha256 = std::array<std::byte, 32>;

/// The digest of `message` (FIPS 180-4). Thread: any. Blocking: no.
Sha256 sha256(std::span<const std::byte> message);

/// The authentication code (RFC 2104) of a message in parts: the same code however it is divided.
/// Thread: any. Blocking: no.
Sha256 hmac_sha256(std::span<const std::byte> key,
                   std::initializer_list<std::span<const std::byte>> message);

/// Whether the bytes are equal. The time depends on the sizes only, so an attacker who guesses a
/// code does not learn how much of it is right. Thread: any. Blocking: no.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace torch_ring
