// SPDX-License-Identifier: Apache-2.0
// Handshake: both ends against each other, and each end against strangers.
#include "transport/handshake.h"

#include <cstring>
#include <string_view>

#include "handshake_pair.h"

namespace torch_ring::test::handshake_test {
namespace {

constexpr std::size_t kHelloBytes = 64;
constexpr std::size_t kChallengeBytes = 40;
constexpr std::size_t kProofBytes = 32;
constexpr std::size_t kVerdictBytes = 33;

Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

template <class T>
T load(const Bytes& bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

template <class T>
Bytes with(Bytes bytes, std::size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
  return bytes;
}

/// The proof of `side` ("connect" or "accept"), from the messages on the wire.
Bytes proof(const Key& key, std::string_view side, const Bytes& hello, const Bytes& challenge) {
  Bytes message = bytes_of(side);
  message.push_back(std::byte{0});
  message.insert(message.end(), hello.begin(), hello.end());
  message.insert(message.end(), challenge.begin() + 8, challenge.end());
  const Sha256 code = hmac_sha256(key, {message});
  return {code.begin(), code.end()};
}

bool ended(Handshake& end) { return end.outgoing().empty() && end.incoming().empty(); }

TEST(handshake_of_two_ends_in_whole_messages_and_byte_by_byte) {
  for (const std::size_t part : {1, 7, 1000}) {
    HandshakePair pair;
    for (int round = 0; round < 2; ++round) {
      give(pair.accepting, take(pair.connecting), [&] { return part; });
      give(pair.connecting, take(pair.accepting), [&] { return part; });
    }
    for (Handshake* const end : {&pair.connecting, &pair.accepting}) {
      CHECK(end->done() && ended(*end));
      CHECK(end->hello() == kHello);
    }
  }
}

/// The hello's layout, and proofs computed from the bytes on the wire, since both ends could share
/// an error.
TEST(handshake_messages_have_their_format_on_the_wire) {
  HandshakePair pair;
  const Bytes hello = take(pair.connecting);
  CHECK_EQ(hello.size(), kHelloBytes);
  CHECK(std::memcmp(hello.data(), "t-ring/4", 8) == 0);
  CHECK_EQ(load<std::uint32_t>(hello, 8), kHello.from);
  CHECK_EQ(load<std::uint32_t>(hello, 12), kHello.to);
  CHECK_EQ(load<std::uint64_t>(hello, 16), kHello.set);
  CHECK_EQ(load<std::uint32_t>(hello, 24), kHello.channel);
  CHECK_EQ(load<std::uint32_t>(hello, 28), 0u);

  give(pair.accepting, hello);
  const Bytes challenge = take(pair.accepting);
  CHECK_EQ(challenge.size(), kChallengeBytes);
  CHECK(std::memcmp(challenge.data(), "t-ring/4", 8) == 0);

  give(pair.connecting, challenge);
  const Bytes answer = take(pair.connecting);
  CHECK(answer == proof(key_of(1), "connect", hello, challenge));
  give(pair.accepting, answer);
  CHECK(!pair.accepting.done());  // before the verdict is sent
  Bytes verdict = bytes_of("W");
  const Bytes accepts = proof(key_of(1), "accept", hello, challenge);
  verdict.insert(verdict.end(), accepts.begin(), accepts.end());
  CHECK(take(pair.accepting) == verdict);
  CHECK(pair.accepting.done());
}

/// No byte that the accepting side sends to a stranger depends on the key, so a stranger cannot try
/// keys offline.
TEST(handshake_lets_the_connecting_side_prove_first) {
  HandshakePair pair;
  Bytes hello = take(pair.connecting);
  give(pair.accepting, hello);
  const Bytes challenge = take(pair.accepting);
  CHECK_EQ(challenge.size(), 8 + sizeof(Sha256));  // the magic and a nonce
  give(pair.accepting, Bytes(kProofBytes));
  Bytes refusal(kVerdictBytes);
  refusal.front() = std::byte{'N'};
  CHECK(take(pair.accepting) == refusal);
  CHECK(ended(pair.accepting) && !pair.accepting.done());
}

/// Data right behind the handshake stays in the socket.
TEST(handshake_asks_for_no_byte_beyond_it) {
  HandshakePair pair;
  const Bytes hello = take(pair.connecting);
  const auto followed = [](Bytes message) {
    message.resize(message.size() + 100, std::byte{'d'});
    return message;
  };
  CHECK_EQ(give(pair.accepting, followed(hello)), kHelloBytes);
  CHECK_EQ(give(pair.connecting, followed(take(pair.accepting))), kChallengeBytes);
  CHECK_EQ(give(pair.accepting, followed(take(pair.connecting))), kProofBytes);
  CHECK_EQ(give(pair.connecting, followed(take(pair.accepting))), kVerdictBytes);
  CHECK(pair.connecting.done() && pair.accepting.done());
}

TEST(handshake_of_ranks_with_different_keys_tells_the_connecting_side) {
  Handshake connecting = Handshake::connecting(key_of(2), kHello);
  Handshake accepting = Handshake::accepting(key_of(1), kHello.to);
  give(accepting, take(connecting));
  give(connecting, take(accepting));
  give(accepting, take(connecting));
  CHECK_THROWS(give(connecting, take(accepting)), ErrorKind::kMismatch,
               "rank 1 does not know the secret that rank 3 knows: is TORCH_RING_SECRET the same "
               "on all ranks?");
  CHECK(ended(connecting) && !connecting.done());
  CHECK(ended(accepting) && !accepting.done());
}

/// A stranger that listens at a rank's address gets a proof, and cannot give one.
TEST(handshake_refuses_a_welcome_without_a_proof) {
  HandshakePair pair;
  const Bytes hello = take(pair.connecting);
  give(pair.accepting, hello);
  const Bytes challenge = take(pair.accepting);
  give(pair.connecting, challenge);
  Bytes echo = take(pair.connecting);  // a valid proof, but the other side's
  CHECK(echo == proof(key_of(1), "connect", hello, challenge));
  echo.insert(echo.begin(), std::byte{'W'});
  CHECK_THROWS(give(pair.connecting, echo), ErrorKind::kMismatch, "does not know the secret");
  CHECK(ended(pair.connecting) && !pair.connecting.done());
}

TEST(handshake_refuses_a_hello_for_another_rank_or_from_itself) {
  HandshakePair pair;
  const Bytes hello = take(pair.connecting);
  Handshake accepting = Handshake::accepting(key_of(1), 2);
  CHECK_THROWS(give(accepting, hello), ErrorKind::kPeerLost,
               "the connection is from rank 3 to rank 1, but this is rank 2");
  CHECK(ended(accepting) && !accepting.done());
  Handshake itself = Handshake::accepting(key_of(1), kHello.to);
  CHECK_THROWS(give(itself, with(hello, 8, kHello.to)), ErrorKind::kPeerLost,
               "from rank 1 to rank 1");
}

/// The nonce of the accepting side is new, so the proof of an earlier handshake is useless.
TEST(handshake_refuses_a_replay) {
  HandshakePair pair;
  const Bytes hello = take(pair.connecting);
  give(pair.accepting, hello);
  const Bytes challenge = take(pair.accepting);
  give(pair.connecting, challenge);
  const Bytes answer = take(pair.connecting);
  give(pair.accepting, answer);
  const Bytes verdict = take(pair.accepting);
  CHECK(pair.accepting.done());

  Handshake accepting = Handshake::accepting(key_of(1), kHello.to);
  give(accepting, hello);
  take(accepting);
  give(accepting, answer);
  CHECK(take(accepting).front() == std::byte{'N'});
  CHECK(ended(accepting) && !accepting.done());

  Handshake connecting = Handshake::connecting(key_of(1), kHello);
  take(connecting);
  give(connecting, challenge);
  take(connecting);
  CHECK_THROWS(give(connecting, verdict), ErrorKind::kMismatch, "does not know the secret");
}

/// Each bit of each message counts, also of the hello, which both proofs cover.
TEST(handshake_is_never_done_if_a_bit_has_changed) {
  constexpr std::size_t kBytes[] = {kHelloBytes, kChallengeBytes, kProofBytes, kVerdictBytes};
  for (std::size_t message = 0; message < std::size(kBytes); ++message) {
    for (std::size_t bit = 0; bit < 8 * kBytes[message]; ++bit) {
      HandshakePair pair;
      Handshake* from = &pair.connecting;
      Handshake* to = &pair.accepting;
      bool refused = false;
      try {
        for (std::size_t i = 0; i < std::size(kBytes); ++i, std::swap(from, to)) {
          Bytes bytes = take(*from);
          CHECK_EQ(bytes.size(), kBytes[i]);
          if (i == message) bytes[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
          give(*to, bytes);
        }
      } catch (const Error&) {
        refused = true;
      }
      CHECK(refused);
      CHECK(!pair.connecting.done());
      CHECK_EQ(pair.accepting.done(), message == 3);  // it has sent its welcome, as it should
    }
  }
}

TEST(handshake_knows_a_stranger_by_its_first_bytes) {
  for (const std::string_view text : {"G", "SSH-2.0-OpenSSH", "t-ring/3", "t-ring/5"}) {
    HandshakePair pair;
    CHECK_THROWS(give(pair.accepting, bytes_of(text)), ErrorKind::kPeerLost,
                 "is no torch_ring, or one of another version");
    CHECK(ended(pair.accepting) && !pair.accepting.done());
    take(pair.connecting);
    CHECK_THROWS(give(pair.connecting, bytes_of(text)), ErrorKind::kPeerLost,
                 "is no torch_ring, or one of another version");
    CHECK(ended(pair.connecting) && !pair.connecting.done());
  }
}

TEST(handshake_refuses_a_hello_with_bytes_that_should_be_zero) {
  HandshakePair pair;
  CHECK_THROWS(give(pair.accepting, with(take(pair.connecting), 28, std::uint32_t{1})),
               ErrorKind::kPeerLost, "broken");
}

TEST(handshake_refuses_another_byte_than_the_welcome) {
  HandshakePair pair;
  give(pair.accepting, take(pair.connecting));
  give(pair.connecting, take(pair.accepting));
  take(pair.connecting);
  CHECK_THROWS(give(pair.connecting, bytes_of("X" + std::string(kProofBytes, 'x'))),
               ErrorKind::kPeerLost, "rank 1 does not welcome the connection");
}

}  // namespace
}  // namespace torch_ring::test::handshake_test
