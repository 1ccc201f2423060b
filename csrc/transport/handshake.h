// SPDX-License-Identifier: Apache-2.0
// Handshake: mutual authentication of the two ends of a connection. No I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
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

/// The Error(kMismatch) of a connecting rank whose peer has another key.
Error other_secret(const Hello& hello);

/// One end of a handshake, as a state machine: the owner sends outgoing(), and receives into
/// incoming(), until done(). It never asks for a byte beyond the handshake.
///
/// The connecting side sends a hello with a nonce. The accepting side challenges it with a nonce of
/// its own, the connecting side answers with its proof, the accepting side with a verdict: its own
/// proof, or a refusal. So a stranger who connects to a listener gets nothing that helps to guess a
/// weak secret. A proof is an HMAC-SHA256, under the key, of a tag for the side, the hello, and the
/// accepting side's nonce, so that it is valid in this handshake and direction only. Data sent
/// afterwards is not encrypted: with TORCH_RING_TLS TlsStream takes its place.
///
/// Thread: one at a time. Blocking: no. Errors: see received(). After one of them there is nothing
/// more to send or to receive, and the handshake is never done.
class Handshake {
 public:
  /// Errors: Error(kInternal) if the system gives no random bytes.
  static Handshake connecting(const Key& key, const Hello& hello);
  static Handshake accepting(const Key& key, std::uint32_t rank);

  std::span<const std::byte> outgoing() const { return std::span(outgoing_).subspan(sent_); }
  /// Records bytes sent from the front of outgoing().
  void sent(std::size_t bytes);

  /// The room for the next bytes to receive; empty while there is something to send first.
  std::span<std::byte> incoming();
  /// Records bytes received into the front of incoming(). A peer without a valid proof gets a
  /// refusal; then there is nothing more to receive, and done() stays false. Errors, and the
  /// owner's reaction:
  ///
  ///   kPeerLost   the other end is not a peer, or is for another rank: drop the connection. An
  ///               open port attracts strangers, so this is not a reason to fail.
  ///   kMismatch   on the connecting side only: the other end is a rank with another key. Fail,
  ///               because it will not go away; the text says what to do.
  ///   kInternal   the system gives no random bytes.
  void received(std::size_t bytes);

  bool done() const { return awaited_ == Awaited::kNothing && outgoing().empty() && !has_refused_; }

  /// The connection's name. On the accepting side only after done(); its owner checks that the
  /// rank, set and channel exist.
  const Hello& hello() const { return hello_; }

 private:
  enum class Awaited : std::uint8_t { kHello, kChallenge, kProof, kVerdict, kNothing };
  using Nonce = Sha256;

  Handshake(const Key& key, const Hello& hello) : key_(key), hello_(hello) {}

  void send(std::span<const std::byte> message);
  void await(Awaited message, std::size_t bytes);
  void take_hello();
  void take_challenge();
  void take_proof();
  void take_verdict();
  void check_magic();
  Sha256 proof_of(const char* side) const;
  [[noreturn]] void refuse(ErrorKind kind, const std::string& why);

  Key key_;
  Hello hello_;                        // on the accepting side at first only `to`: its own rank
  std::vector<std::byte> hello_sent_;  // the message, which both proofs cover
  Nonce nonce_{};                      // of the accepting side
  std::vector<std::byte> outgoing_;
  std::size_t sent_ = 0;             // of outgoing_
  std::vector<std::byte> incoming_;  // as long as the awaited message
  std::size_t received_ = 0;         // of incoming_
  Awaited awaited_ = Awaited::kHello;
  bool has_refused_ = false;  // the other end has sent a wrong proof
};

}  // namespace torch_ring
