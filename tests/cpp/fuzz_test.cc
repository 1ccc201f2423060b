// SPDX-License-Identifier: Apache-2.0
// Broken bytes from the wire are refused or read, never trusted. A failure names the case; case i
// always uses Rng(i).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "control/message.h"
#include "entries.h"
#include "harness.h"

namespace torch_ring::test::fuzz_test {
namespace {

using Rng = std::mt19937_64;

/// A number below `end`, which is not 0. The standard's distributions differ between libraries.
std::size_t below(std::size_t end, Rng& rng) { return rng() % end; }

std::vector<std::byte> random_bytes(std::size_t count, Rng& rng) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
  return bytes;
}

/// An integer at which a size, a count or an index may overflow.
std::uint64_t boundary(Rng& rng) {
  const std::uint64_t power = std::uint64_t{1} << below(64, rng);
  return power + below(3, rng) - 1;
}

/// One change to `bytes`.
void mutate_once(std::vector<std::byte>& bytes, Rng& rng) {
  const auto place = [&] { return static_cast<std::ptrdiff_t>(below(bytes.size() + 1, rng)); };
  std::ptrdiff_t begin = place();
  std::ptrdiff_t end = std::min<std::ptrdiff_t>(place(), begin + 64);
  if (begin > end) std::swap(begin, end);
  switch (bytes.empty() ? 0 : below(6, rng)) {
    case 0: {
      const auto inserted = random_bytes(1 + below(16, rng), rng);
      bytes.insert(bytes.begin() + begin, inserted.begin(), inserted.end());
      break;
    }
    case 1:
      bytes.erase(bytes.begin() + begin, bytes.begin() + end);
      break;
    case 2:
      bytes.resize(below(bytes.size(), rng));
      break;
    case 3: {
      const std::vector<std::byte> again(bytes.begin() + begin, bytes.begin() + end);
      bytes.insert(bytes.begin() + place(), again.begin(), again.end());
      break;
    }
    case 4:
      bytes[below(bytes.size(), rng)] ^= std::byte{1} << static_cast<int>(below(8, rng));
      break;
    default: {  // an aligned integer of one to eight bytes
      const std::uint64_t value = boundary(rng);
      const std::size_t width = std::size_t{1} << below(4, rng);
      const std::size_t at = below(bytes.size(), rng) / width * width;
      std::memcpy(bytes.data() + at, &value, std::min(width, bytes.size() - at));
    }
  }
}

/// `bytes` with one to four changes. The result has no spare capacity, so AddressSanitizer sees a
/// read beyond it.
std::vector<std::byte> mutate(std::vector<std::byte> bytes, Rng& rng) {
  for (std::size_t changes = 1 + below(4, rng); changes > 0; --changes) mutate_once(bytes, rng);
  return {bytes.begin(), bytes.end()};
}

/// Runs one(rng) for each case.
template <class One>
void fuzz(std::uint64_t cases, One&& one) {
  for (std::uint64_t i = 0; i < cases; ++i) {
    Rng rng(i);
    try {
      one(rng);
    } catch (const std::exception& error) {
      throw CheckFailed("case " + std::to_string(i) + ": " + error.what());
    }
  }
}

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
  return parts_of(writer);
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
    tally.add(check({mutate(valid.common, rng), valid.own, {}}));
    tally.add(check({valid.common, mutate(valid.own, rng), {}}));
    check({random_bytes(below(100, rng), rng), random_bytes(below(100, rng), rng), {}});
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

}  // namespace
}  // namespace torch_ring::test::fuzz_test
