// SPDX-License-Identifier: Apache-2.0
#include "transport/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace torch_ring {

namespace {

// The messages on the wire. Both sides' first one begins with the magic, so that each side
// recognises a stranger by its first bytes and need not wait for more of them.

constexpr std::string_view kMagic = "t-ring/4";

struct HelloMessage {
  std::array<char, 8> magic;
  std::uint32_t from;
  std::uint32_t to;
  std::uint64_t set;
  std::uint32_t channel;
  std::uint32_t zero;
  Sha256 nonce;
};
static_assert(sizeof(HelloMessage) == 64);

struct ChallengeMessage {
  std::array<char, 8> magic;
  Sha256 nonce;
};
static_assert(sizeof(ChallengeMessage) == 40);

struct VerdictMessage {
  std::byte verdict;
  Sha256 proof;  // zero in a refusal
};
static_assert(sizeof(VerdictMessage) == 33);

constexpr std::byte kWelcome{'W'};
constexpr std::byte kRefusal{'N'};

static_assert(std::endian::native == std::endian::little, "the wire's integers are little endian");

// The tags of the two sides' proofs. Neither is a prefix of the other.
constexpr const char* kConnects = "connect";
constexpr const char* kAccepts = "accept";

std::array<char, 8> magic() {
  std::array<char, 8> bytes;
  std::ranges::copy(kMagic, bytes.begin());
  return bytes;
}

Sha256 random_nonce() {
  Sha256 nonce;
  ssize_t bytes;
  do {
    bytes = ::getrandom(nonce.data(), nonce.size(), 0);
  } while (bytes < 0 && errno == EINTR);
  // getrandom(2): a request of up to 256 bytes is never cut short.
  if (bytes != static_cast<ssize_t>(nonce.size())) throw_errno("getrandom");
  return nonce;
}

template <class Message>
std::span<const std::byte> as_bytes(const Message& message) {
  return std::as_bytes(std::span(&message, 1));
}

std::string name_of(std::uint32_t rank) { return "rank " + std::to_string(rank); }

}  // namespace

Error other_secret(const Hello& hello) {
  return {ErrorKind::kMismatch, name_of(hello.to) + " does not know the secret that " +
                                    name_of(hello.from) +
                                    " knows: is TORCH_RING_SECRET the same on all ranks?"};
}

Handshake Handshake::connecting(const Key& key, const Hello& hello) {
  Handshake handshake(key, hello);
  const HelloMessage message{magic(),       hello.from, hello.to,      hello.set,
                             hello.channel, 0,          random_nonce()};
  const auto bytes = as_bytes(message);
  handshake.hello_sent_.assign(bytes.begin(), bytes.end());
  handshake.send(bytes);
  handshake.await(Awaited::kChallenge, sizeof(ChallengeMessage));
  return handshake;
}

Handshake Handshake::accepting(const Key& key, std::uint32_t rank) {
  Handshake handshake(key, Hello{.to = rank});
  handshake.await(Awaited::kHello, sizeof(HelloMessage));
  return handshake;
}

void Handshake::sent(std::size_t bytes) {
  assert(bytes <= outgoing().size());
  sent_ += bytes;
}

std::span<std::byte> Handshake::incoming() {
  if (!outgoing().empty()) return {};
  return std::span(incoming_).subspan(received_);
}

void Handshake::received(std::size_t bytes) {
  assert(bytes <= incoming().size());
  if (bytes == 0) return;
  received_ += bytes;
  if (awaited_ == Awaited::kHello || awaited_ == Awaited::kChallenge) check_magic();
  if (received_ < incoming_.size()) return;
  switch (awaited_) {
    case Awaited::kHello:
      return take_hello();
    case Awaited::kChallenge:
      return take_challenge();
    case Awaited::kProof:
      return take_proof();
    case Awaited::kVerdict:
      return take_verdict();
    case Awaited::kNothing:
      return;
  }
}

void Handshake::take_hello() {
  HelloMessage message;
  std::memcpy(&message, incoming_.data(), sizeof message);
  const std::uint32_t rank = hello_.to;
  if (message.zero != 0) refuse(ErrorKind::kPeerLost, "the hello of the other end is broken");
  if (message.to != rank || message.from == rank) {
    refuse(ErrorKind::kPeerLost, "the connection is from " + name_of(message.from) + " to " +
                                     name_of(message.to) + ", but this is " + name_of(rank));
  }
  hello_ = {message.from, message.to, message.set, message.channel};
  hello_sent_ = incoming_;
  nonce_ = random_nonce();
  send(as_bytes(ChallengeMessage{magic(), nonce_}));
  await(Awaited::kProof, sizeof(Sha256));
}

void Handshake::take_challenge() {
  ChallengeMessage challenge;
  std::memcpy(&challenge, incoming_.data(), sizeof challenge);
  nonce_ = challenge.nonce;
  send(proof_of(kConnects));
  await(Awaited::kVerdict, sizeof(VerdictMessage));
}

void Handshake::take_proof() {
  has_refused_ = !equal_in_constant_time(incoming_, proof_of(kConnects));
  send(as_bytes(has_refused_ ? VerdictMessage{kRefusal, {}}
                             : VerdictMessage{kWelcome, proof_of(kAccepts)}));
  await(Awaited::kNothing, 0);
}

void Handshake::take_verdict() {
  VerdictMessage message;
  std::memcpy(&message, incoming_.data(), sizeof message);
  if (message.verdict != kWelcome && message.verdict != kRefusal) {
    refuse(ErrorKind::kPeerLost, name_of(hello_.to) + " does not welcome the connection");
  }
  if (message.verdict == kRefusal || !equal_in_constant_time(message.proof, proof_of(kAccepts))) {
    const Error error = other_secret(hello_);
    refuse(error.kind(), error.what());
  }
  await(Awaited::kNothing, 0);
}

/// Checks the bytes of the magic that have arrived.
void Handshake::check_magic() {
  const std::size_t bytes = std::min(received_, kMagic.size());
  if (std::memcmp(incoming_.data(), kMagic.data(), bytes) == 0) return;
  refuse(ErrorKind::kPeerLost, "the other end is no torch_ring, or one of another version");
}

Sha256 Handshake::proof_of(const char* side) const {
  const std::span<const std::byte> tag = std::as_bytes(std::span(side, std::strlen(side) + 1));
  return hmac_sha256(key_, {tag, hello_sent_, nonce_});
}

void Handshake::send(std::span<const std::byte> message) {
  outgoing_.assign(message.begin(), message.end());
  sent_ = 0;
}

void Handshake::await(Awaited message, std::size_t bytes) {
  awaited_ = message;
  incoming_.assign(bytes, std::byte{0});
  received_ = 0;
}

void Handshake::refuse(ErrorKind kind, const std::string& why) {
  incoming_.clear();
  received_ = 0;
  throw Error(kind, why);
}

}  // namespace torch_ring
