// SPDX-License-Identifier: Apache-2.0
// Message, MessageParser: the messages of control connections. No I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace torch_ring {

/// News of one rank, or a sign of life. On the wire, little-endian and without gaps:
///
///   u8 kind | u8 error | u16 bytes of text | u32 rank | u32 reporter | u64 set | u64 rounds | text
struct Message {
  enum class Kind : std::uint8_t {
    kHeartbeat = 'H',  // from `rank`, for the receiver only
    kLeft = 'E',       // `rank` has left `set`, which has `reporter` other members, after it
                       // completed `rounds` rounds of its board
    kDeparted = 'D',   // `rank` has left in peace: all of its sets, after kLeft of those it used
    kLost = 'L',       // `rank` is lost, as `reporter` has seen; `text`: how
    kFailed = 'F',     // `rank` has given up `set`, because of `error` and `text`
    kWaits = 'W',      // `rank` waits in `set`: wait()
    kAsks = 'A',       // `rank` asks rank `rounds`, as its question number `set`: `text`
    kAnswers = 'R',    // `rank` answers rank `rounds`' question number `set` by `text`
    kStops = 'S',      // a stop is wanted, and `rank` has passed `rounds` points at which it could
                       // stop; `text`: the signal that it got; empty: it has heard of another's
  };
  static constexpr std::size_t kHeaderBytes = 28;
  static constexpr std::size_t kQuestionBytes = 16;
  static constexpr std::size_t kTextBytes = 4096;  // longer texts are cut

  Kind kind = Kind::kHeartbeat;
  ErrorKind error = ErrorKind::kPeerLost;
  int rank = 0;
  int reporter = 0;
  std::uint64_t set = 0;
  std::uint64_t rounds = 0;
  std::string text;

  static Message heartbeat(int rank) { return {Kind::kHeartbeat, {}, rank, rank, 0, 0, {}}; }
  /// `members`: of the set. `why`: the program's exception, if it has failed.
  static Message left(int rank, std::uint64_t set, std::uint64_t rounds, int members,
                      std::string why);
  /// Precondition: a kLeft.
  int members() const { return reporter + 1; }
  static Message departed(int rank, std::string why = {});
  static Message lost(int rank, int reporter, std::string how);
  static Message failed(int rank, std::uint64_t set, const Error& cause);

  /// The content of a kWaits: its number, which grows with each one of its rank, and the ranks that
  /// its rank waits for; none if it waits no longer. In `text`: u64 number | u32 rank...
  struct Wait {
    static constexpr std::size_t kMostRanks = 64;  // other waiting ranks tell the rest

    std::uint64_t number = 0;
    std::vector<int> ranks;
  };
  static Message waits(int rank, std::uint64_t set, const Wait& wait);
  /// Precondition: a kWaits.
  Wait wait() const;

  static Message asks(int rank, int whom, std::uint64_t number, std::string question = {}) {
    return {Kind::kAsks,        {}, rank, rank, number, static_cast<std::uint64_t>(whom),
            std::move(question)};
  }
  static Message stops(int rank, std::uint64_t points, std::string signal) {
    return {Kind::kStops, {}, rank, rank, 0, points, std::move(signal)};
  }
  static Message answers(int rank, int whom, std::uint64_t number, std::string text);
  /// Precondition: a kAsks or kAnswers. The rank that it is for.
  int recipient() const { return static_cast<int>(rounds); }

  void append_to(std::string& frames) const;
  bool operator==(const Message&) const = default;
};

/// Parses messages from a stream of bytes, and validates them.
/// Thread: one at a time.
class MessageParser {
 public:
  /// `size`: the number of ranks.
  explicit MessageParser(int size) : size_(size) {}

  void append(std::string_view bytes) { bytes_.append(bytes); }

  /// The next message; none if it is not complete yet. Errors: Error(kPeerLost), for ever, if the
  /// bytes are not a message.
  std::optional<Message> next();

 private:
  const int size_;
  std::string bytes_;  // received, from done_ on not yet parsed
  std::size_t done_ = 0;
};

}  // namespace torch_ring
