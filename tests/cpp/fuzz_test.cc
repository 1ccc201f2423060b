// SPDX-License-Identifier: Apache-2.0
// Broken bytes from the wire are refused or read, never trusted.
#include "fuzz.h"

#include <functional>
#include <optional>
#include <string_view>

#include "control/message.h"
#include "engine/entry.h"
#include "handshake_pair.h"

namespace torch_ring::test::fuzz_test {

namespace {

// --- engine/entry.h

/// A fingerprint of any kind that encode() can write.
Fingerprint random_fingerprint(Rng& rng) {
  Fingerprint f;
  f.collective = static_cast<Collective>(below(7, rng));
  do {
    f.dtype = static_cast<DType>(below(kDTypeCount, rng));
    f.op = static_cast<ReduceOp>(below(6, rng));
  } while (!can_reduce(f.dtype, f.op));
  f.device = static_cast<std::uint8_t>(below(3, rng));
  f.root = static_cast<std::int32_t>(below(4, rng)) - 1;
  f.prescale = below(2, rng) == 0 ? 1.0 : 0.5;
  f.joinable = below(2, rng) == 0;
  f.tells_expected = below(2, rng) == 0;
  for (std::size_t i = below(5, rng); i > 0; --i) {
    f.shape.push_back(static_cast<std::int64_t>(below(100, rng)));
  }
  f.name = std::string(below(40, rng), 'n');
  return f;
}

Bytes random_fingerprint_bytes(Rng& rng) {
  Bytes bytes;
  encode(random_fingerprint(rng), bytes);
  return bytes;
}

/// The parts of an entry that other hosts receive.
struct Parts {
  Bytes common;
  Bytes own;
};

/// A valid entry with up to four announcements.
Parts random_entry(Rng& rng) {
  EntryWriter writer;
  writer.clear(below(2, rng) == 0);
  for (std::size_t i = below(5, rng); i > 0; --i) {
    const Bytes fingerprint = random_fingerprint_bytes(rng);
    const Bytes payload = random_bytes(below(100, rng), rng);
    const Bytes rows = random_bytes(8 * below(4, rng), rng);
    Announcement announcement;
    announcement.fingerprint = fingerprint;
    announcement.rows = rows;
    announcement.is_inline = below(2, rng) == 0;
    if (announcement.is_inline) announcement.payload = payload;
    announcement.is_shared = below(2, rng) == 0;
    announcement.shared_offset = static_cast<std::int64_t>(below(1000, rng));
    writer.append(announcement);
  }
  const Post post = writer.post();
  return {{post.common.begin(), post.common.end()}, {post.own.begin(), post.own.end()}};
}

/// All announcements of an entry.
std::vector<Announcement> read(const Parts& entry) {
  EntryReader reader(entry.common, entry.own);
  std::vector<Announcement> announcements;
  while (reader.left() > 0) announcements.push_back(reader.next());
  return announcements;
}

/// The result of parse(), or nothing if it refuses the bytes by the error of its contract.
template <class Parse>
auto parsed_or_refused(Parse&& parse) -> std::optional<decltype(parse())> {
  try {
    return parse();
  } catch (const Error& error) {
    CHECK_EQ(static_cast<int>(error.kind()), static_cast<int>(ErrorKind::kInternal));
    return std::nullopt;
  }
}

bool within(ByteSpan part, ByteSpan whole) {
  return part.empty() ||
         (std::greater_equal<>()(part.data(), whole.data()) && part.size() <= whole.size() &&
          static_cast<std::size_t>(part.data() - whole.data()) <= whole.size() - part.size());
}

/// Checks that an announcement lies within its entry.
void check_announcement(const Announcement& a, const Parts& entry) {
  CHECK(within(a.fingerprint, entry.common) && within(a.payload, entry.own) &&
        within(a.rows, entry.own));
  CHECK_EQ(a.rows.size() % 8, 0u);
  CHECK(a.payload.size() + a.rows.size() <= entry.own.size());
}

/// Counts the outcomes: a fuzzer whose cases all end alike fails.
struct Tally {
  int parsed = 0;
  int refused = 0;

  void add(bool is_parsed) { ++(is_parsed ? parsed : refused); }
  void check_both(int least) const {
    CHECK(parsed >= least);
    CHECK(refused >= least);
  }
};

constexpr std::uint64_t kCases = kSanitized ? 2'000 : 10'000;

// --- control/message.h

Message random_message(Rng& rng) {
  const int rank = static_cast<int>(below(8, rng));
  const std::string text(below(300, rng), 't');
  switch (below(5, rng)) {
    case 0:
      return Message::heartbeat(rank);
    case 1:
      return Message::departed(rank, text);
    case 4:
      return Message::left(rank, rng(), rng(), 8, text);
    case 2:
      return Message::lost(rank, (rank + 1) % 8, text);
    default:
      return Message::failed(rank, rng(), Error(static_cast<ErrorKind>(below(5, rng)), text));
  }
}

// --- transport/handshake.h

using Messages = std::vector<Bytes>;

/// The messages of the two ends of a handshake, in turn; `change(i, message)` may change each
/// message on its way. Messages arrive in parts of random sizes. run() returns when an end has
/// refused, or takes no more and has nothing to send.
struct Exchange {
  HandshakePair pair;
  bool is_intact = true;  // whether the received part of each message was unchanged

  void run(const std::function<Bytes(std::size_t, const Bytes&)>& change, Rng& rng) {
    Handshake* from = &pair.connecting;
    Handshake* to = &pair.accepting;
    for (std::size_t i = 0; i < 4; ++i, std::swap(from, to)) {
      const Bytes sent = take(*from);
      if (sent.empty()) return;
      const Bytes arriving = change(i, sent);
      const bool whole =
          arriving.size() >= sent.size() && std::equal(sent.begin(), sent.end(), arriving.begin());
      is_intact = is_intact && whole;
      const std::size_t given = give(*to, arriving, [&] { return 1 + below(80, rng); });
      CHECK(given <= sent.size());
    }
  }
};

}  // namespace

TEST(fuzz_mutate_is_the_same_in_every_run_and_changes_nearly_every_input) {
  const Bytes input(50, std::byte{7});
  int changed = 0;
  fuzz(1000, [&](Rng& rng) {
    Rng same = rng;
    const Bytes output = mutate(input, rng);
    CHECK(output == mutate(input, same));
    changed += output != input;
    CHECK(output.size() <= input.size() + 4 * 64);
  });
  CHECK(changed > 900);
  fuzz(100, [](Rng& rng) { mutate({}, rng); });
}

TEST(fuzz_decode_reads_what_encode_writes_and_nothing_else) {
  Tally tally;
  fuzz(kCases, [&](Rng& rng) {
    const Bytes valid = random_fingerprint_bytes(rng);
    const auto check = [&](const Bytes& bytes) {
      const auto fingerprint = parsed_or_refused([&] { return decode(bytes); });
      if (fingerprint) {
        Bytes again;
        encode(*fingerprint, again);
        CHECK(again == bytes);  // so its content is exactly its bytes
      }
      return fingerprint.has_value();
    };
    CHECK(check(valid));
    tally.add(check(mutate(valid, rng)));
    check(random_bytes(below(100, rng), rng));
  });
  tally.check_both(kCases / 20);
}

TEST(fuzz_entries) {
  Tally tally;
  fuzz(kCases, [&](Rng& rng) {
    const auto check = [&](const Parts& entry) {
      const auto announcements = parsed_or_refused([&] { return read(entry); });
      if (!announcements) return false;
      for (const Announcement& a : *announcements) {
        check_announcement(a, entry);
        parsed_or_refused([&] { return decode(a.fingerprint); });
      }
      return true;
    };
    const Parts valid = random_entry(rng);
    CHECK(check(valid));
    tally.add(check({mutate(valid.common, rng), valid.own}));
    tally.add(check({valid.common, mutate(valid.own, rng)}));
    check({random_bytes(below(100, rng), rng), random_bytes(below(100, rng), rng)});
  });
  tally.check_both(kCases / 20);
}

/// A parser reads the messages of append_to(), and from changed bytes only valid messages or none.
TEST(fuzz_control_messages) {
  Tally tally;
  fuzz(kCases, [&](Rng& rng) {
    std::string frames;
    std::vector<Message> sent;
    for (std::size_t i = 1 + below(4, rng); i > 0; --i) sent.push_back(random_message(rng));
    for (const Message& message : sent) message.append_to(frames);
    const auto received = [&](std::string_view bytes) {
      MessageParser parser(8);
      std::vector<Message> messages;
      while (!bytes.empty()) {
        const std::size_t part = 1 + below(std::min<std::size_t>(bytes.size(), 100), rng);
        parser.append(bytes.substr(0, part));
        bytes.remove_prefix(part);
        while (auto message = parser.next()) messages.push_back(std::move(*message));
      }
      return messages;
    };
    CHECK(received(frames) == sent);
    Bytes bytes(frames.size());
    std::memcpy(bytes.data(), frames.data(), frames.size());
    const Bytes broken =
        below(4, rng) == 0 ? random_bytes(below(300, rng), rng) : mutate(bytes, rng);
    const std::string_view wire(reinterpret_cast<const char*>(broken.data()), broken.size());
    try {
      std::string again;
      for (const Message& message : received(wire)) {
        CHECK(message.rank < 8 && message.reporter < 8);
        message.append_to(again);
      }
      CHECK(wire.starts_with(again));  // append_to() writes the same bytes for the parsed messages
      tally.add(true);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kPeerLost);
      tally.add(false);
    }
  });
  tally.check_both(kCases / 20);
}

/// Both ends have the key, and an attacker between them changes their messages.
TEST(fuzz_handshake_with_changed_messages_is_never_done) {
  Tally tally;
  fuzz(kCases / 5, [&](Rng& rng) {
    Exchange exchange;
    const std::size_t changed = below(5, rng);  // 4: none of the four messages
    try {
      exchange.run([&](std::size_t i,
                       const Bytes& bytes) { return i == changed ? mutate(bytes, rng) : bytes; },
                   rng);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kMismatch);
      CHECK(!exchange.is_intact);
    }
    const auto& [connecting, accepting] = exchange.pair;
    CHECK_EQ(connecting.done(), exchange.is_intact);
    CHECK(!accepting.done() || exchange.is_intact || changed == 3);
    tally.add(connecting.done());
  });
  tally.check_both(kCases / 2000);
}

/// A stranger who knows the protocol, and messages of another handshake, but not the key.
TEST(fuzz_handshake_with_a_stranger_is_never_done) {
  const auto [of_connecting, of_accepting] = [] {
    HandshakePair pair;
    Bytes of_connecting = take(pair.connecting);
    give(pair.accepting, of_connecting);
    Bytes of_accepting = take(pair.accepting);
    give(pair.connecting, of_accepting);
    const Bytes proof = take(pair.connecting);
    of_connecting.insert(of_connecting.end(), proof.begin(), proof.end());
    give(pair.accepting, proof);
    const Bytes verdict = take(pair.accepting);
    of_accepting.insert(of_accepting.end(), verdict.begin(), verdict.end());
    return std::pair(of_connecting, of_accepting);
  }();
  int answered = 0;
  fuzz(kCases / 2, [&](Rng& rng) {
    HandshakePair pair;
    for (Handshake* end : {&pair.connecting, &pair.accepting}) {
      const bool connects = end == &pair.connecting;
      if (connects) take(*end);
      Bytes stream = connects ? of_accepting : of_connecting;
      if (below(4, rng) == 0) stream = random_bytes(below(200, rng), rng);
      if (below(4, rng) > 0) stream = mutate(stream, rng);
      std::size_t given = 0;
      try {
        for (bool goes_on = true; goes_on; goes_on = !take(*end).empty()) {
          given += give(*end, std::span(stream).subspan(given), [&] { return 1 + below(80, rng); });
          answered += !connects && !end->outgoing().empty();
        }
        // It has taken all bytes and waits for more, or it has refused a proof.
        CHECK(given == stream.size() || end->incoming().empty());
        CHECK(!connects || !end->incoming().empty());
      } catch (const Error& error) {
        const bool other_key = connects && error.kind() == ErrorKind::kMismatch;
        CHECK(other_key || error.kind() == ErrorKind::kPeerLost);
        CHECK(end->incoming().empty() && end->outgoing().empty());
      }
      CHECK(!end->done());
    }
  });
  CHECK(answered > 100);  // valid hellos, so that proofs were tried, too
}

}  // namespace torch_ring::test::fuzz_test
