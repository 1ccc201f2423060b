// Handshake: mutual authentication of the two ends of a connection. No I/O.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/sha256.h"

namespace torch_ring {

/// The key of a world: both ends of every connection prove that they know it.
using Key = Sha256;  // std::array<std::byte, 32>

/// Names one connection between two ranks of the world.
struct Hello {
  std::uint32_t from = 0;     // the rank that connects
  std::uint32_t to = 0;       // the rank that accepts
  std::uint64_t set = 0;      // the process set that uses it; 0: the world
  std::uint32_t channel = 0;  // kControl, or a data connection, counted from 1

  static constexpr std::uint32_t kControl = 0;
  bool operator==(const Hello&) const = default;
};

/// One end of a handshake, as a state machine: the owner sends outgoing(), and receives into
/// incoming(), until done(). It never asks for a byte beyond the handshake.
///
/// The connecting side sends a hello with a nonce. The accepting side answers with a nonce of its
/// own and a proof, the connecting side with its proof, the accepting side with a welcome. A proof
/// is an HMAC-SHA256, under the key, of a tag for the side, the hello, and the accepting side's
/// nonce, so that it is valid in this handshake and direction only. Data sent afterwards is not
/// encrypted.
///
/// Thread: one at a time. Blocking: no.
class Handshake {
 public:
  static Handshake connecting(const Key& key, const Hello& hello);
  static Handshake accepting(const Key& key, std::uint32_t rank);

  std::span<const std::byte> outgoing() const;
  void sent(std::size_t bytes);

  /// Where to receive, and at most how many bytes; empty while there is something to send first.
  std::span<std::byte> incoming();
  /// Takes note of bytes received into incoming(). Errors: Error(kPeerLost) if the other end is no
  /// peer, or does not know the key.
  void received(std::size_t bytes);

  bool done() const;

  /// The connection's name. On the accepting side only after done().
  const Hello& hello() const;
};

}  // namespace torch_ring
