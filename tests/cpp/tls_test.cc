// SPDX-License-Identifier: Apache-2.0
// TLS between two ranks: both ends against each other, and strangers on the way.
#include "transport/tls.h"

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <optional>
#include <random>
#include <string_view>
#include <utility>

#include "test_world.h"
#include "tls_pair.h"

namespace torch_ring::test::tls_test {
namespace {

constexpr std::size_t kHeaderBytes = 5;  // of a record: its kind, a version, its length
constexpr int kUp = 0;                   // from the connecting end
constexpr int kDown = 1;

/// Changes the records of a direction on their way; `number` counts them from 0.
using OnTheWay = std::function<std::vector<Bytes>(int direction, int number, Bytes record)>;

std::vector<Bytes> as_they_are(int /*direction*/, int /*number*/, Bytes record) {
  return {std::move(record)};
}

/// Two ends of TLS, and somebody on the way between them.
struct Between {
  explicit Between(OnTheWay on_the_way = as_they_are, int accepting_key = 1,
                   std::uint32_t accepting_rank = kHello.to)
      : on_the_way_(std::move(on_the_way)) {
    auto [one, up] = unix_pair();
    auto [other, down] = unix_pair();
    ends_[kUp] = std::move(up);
    ends_[kDown] = std::move(down);
    connecting.emplace(Authentication::connecting(std::move(one), key_of(1), tls_of(1), kHello));
    accepting.emplace(Authentication::accepting(std::move(other), key_of(accepting_key),
                                                tls_of(accepting_key), accepting_rank));
  }

  /// Moves the bytes that have come.
  void carry() {
    for (const int direction : {kUp, kDown}) {
      Bytes& come = come_[direction];
      std::byte room[4096];
      ssize_t bytes = 0;
      while ((bytes = ::recv(ends_[direction].get(), room, sizeof room, MSG_DONTWAIT)) > 0) {
        come.insert(come.end(), room, room + bytes);
      }
      while (come.size() >= kHeaderBytes) {
        const std::size_t length = kHeaderBytes + 256 * std::to_integer<std::size_t>(come[3]) +
                                   std::to_integer<std::size_t>(come[4]);
        if (come.size() < length) break;
        Bytes record(come.begin(), come.begin() + static_cast<std::ptrdiff_t>(length));
        come.erase(come.begin(), come.begin() + static_cast<std::ptrdiff_t>(length));
        seen[direction].push_back(record);
        for (const Bytes& each : on_the_way_(direction, numbers_[direction]++, record)) {
          CHECK_EQ(::send(ends_[1 - direction].get(), each.data(), each.size(), MSG_NOSIGNAL),
                   static_cast<ssize_t>(each.size()));
        }
      }
    }
  }

  /// Advances both ends until nothing moves any more. Returns the error of an end; "" if none has
  /// one.
  std::string shake_hands() {
    std::string errors;
    bool ended[2] = {};
    for (int idle = 0; idle < 3; ++idle) {
      const auto before = numbers_[kUp] + numbers_[kDown];
      for (const int end : {kUp, kDown}) {
        if (ended[end]) continue;
        try {
          ended[end] = (end == kUp ? connecting : accepting)->advance() != 0;
        } catch (const Error& error) {
          ended[end] = true;
          errors += error.kind() == ErrorKind::kMismatch ? "mismatch: " : "";
          errors += error.what();
        }
        carry();
      }
      if (numbers_[kUp] + numbers_[kDown] > before) idle = -1;
    }
    return errors;
  }

  std::optional<Authentication> connecting;
  std::optional<Authentication> accepting;
  std::vector<Bytes> seen[2];

 private:
  const OnTheWay on_the_way_;
  Fd ends_[2];
  Bytes come_[2];
  int numbers_[2] = {};
};

Bytes random_bytes(std::size_t count) {
  std::mt19937 random(1);
  Bytes bytes(count);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST(tls_names_the_connection_and_carries_bytes_that_nobody_can_read) {
  Between way;
  CHECK_EQ(way.shake_hands(), "");
  CHECK(way.connecting->done() && way.accepting->done());
  CHECK(way.accepting->hello() == kHello);
  const Bytes secret = random_bytes(50'000);
  Socket from = way.connecting->take();
  Socket to = way.accepting->take();
  CHECK_EQ(from.send(secret), 50'000);
  Bytes arrived(secret.size());
  for (std::size_t done = 0; done < arrived.size();) {
    way.carry();
    const ssize_t bytes = to.receive(std::span(arrived).subspan(done));
    CHECK(bytes > 0 || errno == EAGAIN);
    if (bytes > 0) done += static_cast<std::size_t>(bytes);
  }
  CHECK(arrived == secret);
  const auto part = std::span(secret).first(16);
  for (const Bytes& record : way.seen[kUp]) CHECK(std::ranges::search(record, part).empty());
}

/// The peer reads nothing, and then all: what was not sent is sent by later calls, once.
TEST(tls_sends_more_than_the_socket_takes) {
  auto [one, other] = with_tls(tcp_pair());
  const Bytes bytes = random_bytes(20'000'000);
  std::size_t sent = 0;
  for (int full = 0; full < 3;) {
    const ssize_t part = one.send(std::span(bytes).subspan(sent));
    full += part <= 0;
    if (part > 0) sent += static_cast<std::size_t>(part);
  }
  CHECK(sent < bytes.size());
  Bytes arrived(bytes.size());
  std::size_t done = 0;
  while (done < bytes.size()) {
    if (sent < bytes.size()) {
      const ssize_t part = one.send(std::span(bytes).subspan(sent));
      if (part > 0) sent += static_cast<std::size_t>(part);
    }
    const ssize_t part = other.receive(std::span(arrived).subspan(done));
    if (part > 0) done += static_cast<std::size_t>(part);
  }
  CHECK(arrived == bytes);
}

TEST(tls_takes_new_keys_on_the_way) {
  constexpr int kUpdateBytes = 27;  // the record of a KeyUpdate
  int on_the_wire[2] = {};
  for (const bool updates : {false, true}) {
    auto [here, there] = unix_pair();
    const auto context =
        std::make_shared<TlsContext>(key_of(1), std::uint64_t{1} << (updates ? 16 : 60));
    auto one = Authentication::connecting(std::move(here), key_of(1), context, kHello);
    auto other = Authentication::accepting(std::move(there), key_of(1), context, kHello.to);
    shake_hands(one, other);
    Socket from = one.take();
    Socket to = other.take();
    const Bytes bytes = random_bytes(50'000);
    for (int round = 0; round < 10; ++round) {
      CHECK_EQ(from.send(bytes), 50'000);
      int waiting = 0;
      CHECK_EQ(::ioctl(to.get(), FIONREAD, &waiting), 0);
      on_the_wire[updates] += waiting;
      Bytes arrived(bytes.size());
      CHECK_EQ(to.receive(arrived), 50'000);
      CHECK(arrived == bytes);
    }
  }
  CHECK_EQ(on_the_wire[1] - on_the_wire[0], 9 * kUpdateBytes);
}

TEST(tls_refuses_another_key_and_another_rank) {
  Between other_key(as_they_are, 2);
  const std::string error = other_key.shake_hands();
  CHECK(error.find("mismatch: rank 1 does not know the secret that rank 3 knows") !=
        std::string::npos);
  CHECK(!other_key.connecting->done() && !other_key.accepting->done());

  Between other_rank(as_they_are, 1, kHello.to + 1);
  const std::string why = other_rank.shake_hands();  // the connecting end tries again
  CHECK(why.find("no rank of this job") != std::string::npos);
  CHECK(why.find("mismatch") == std::string::npos);
  CHECK(!other_rank.connecting->done() && !other_rank.accepting->done());
}

/// A bit is flipped in each record: then the connecting end is never open, nor is the accepting
/// one, but for its last record.
TEST(tls_refuses_a_changed_handshake) {
  Between plain;
  plain.shake_hands();
  for (const int direction : {kUp, kDown}) {
    for (std::size_t number = 0; number < plain.seen[direction].size(); ++number) {
      const Bytes& seen = plain.seen[direction][number];
      if (seen[0] == std::byte{20}) continue;  // has no meaning in 1.3
      const bool is_last = direction == kDown && number + 1 == plain.seen[kDown].size();
      for (const std::size_t place : {kHeaderBytes, seen.size() / 2, seen.size() - 1}) {
        Between way([&](int to, int which, Bytes record) -> std::vector<Bytes> {
          const bool is_it = to == direction && which == static_cast<int>(number);
          if (is_it) record[std::min(place, record.size() - 1)] ^= std::byte{1};
          return {record};
        });
        way.shake_hands();
        CHECK(!way.connecting->done());
        CHECK(!way.accepting->done() || is_last);
      }
    }
  }
}

/// The accepting end may give a connection up before it has heard all: then the other tries again.
TEST(tls_is_open_only_when_the_other_end_is) {
  Between plain;
  plain.shake_hands();
  const int last = static_cast<int>(plain.seen[kUp].size()) - 1;
  Between way([&](int direction, int number, Bytes record) -> std::vector<Bytes> {
    if (direction == kUp && number == last) return {};
    return {record};
  });
  CHECK_EQ(way.shake_hands(), "");
  CHECK(!way.connecting->done() && !way.accepting->done());
}

/// Half a record is nothing to receive: only the socket can bring the rest.
TEST(tls_waits_for_the_rest_of_a_record) {
  auto [one, other] = with_tls(unix_pair());
  CHECK_EQ(one.send(random_bytes(1000)), 1000);
  std::byte record[4096];
  const ssize_t bytes = ::recv(other.get(), record, sizeof record, MSG_DONTWAIT);
  CHECK(bytes > 1000);
  CHECK_EQ(::send(one.get(), record, 500, MSG_NOSIGNAL), 500);
  Bytes room(1000);
  CHECK_EQ(other.receive(room), -1);
  CHECK_EQ(errno, EAGAIN);
  CHECK(!other.has_received());
  CHECK_EQ(::send(one.get(), record + 500, static_cast<std::size_t>(bytes) - 500, MSG_NOSIGNAL),
           bytes - 500);
  CHECK_EQ(other.receive(room), 1000);
}

/// A forged record is the error of both directions, so that nobody blames the network for it.
TEST(tls_sends_nothing_more_after_a_forged_record) {
  auto [one, other] = with_tls(unix_pair());
  const Bytes forged = random_bytes(100);
  const std::byte header[] = {std::byte{23}, std::byte{3}, std::byte{3}, std::byte{0},
                              std::byte{100}};
  CHECK_EQ(::send(one.get(), header, sizeof header, MSG_NOSIGNAL), ssize_t{sizeof header});
  CHECK_EQ(::send(one.get(), forged.data(), forged.size(), MSG_NOSIGNAL), 100);
  Bytes room(10);
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(other.receive(room), -1);
    CHECK_EQ(errno, EBADMSG);
    CHECK_EQ(other.send(forged), -1);
    CHECK_EQ(errno, EBADMSG);
  }
}

TEST(tls_notices_lost_repeated_swapped_and_recorded_records) {
  using Records = std::vector<Bytes>;
  const Bytes bytes = random_bytes(3000);
  Records recorded;  // of another connection
  for (const auto& deed : std::vector<std::function<void(Records&)>>{
           [&](Records& records) { recorded = records; },
           [](Records& records) { records.erase(records.begin()); },
           [](Records& records) { records.insert(records.begin(), records[0]); },
           [](Records& records) { std::swap(records[0], records[1]); },
           [&](Records& records) { records = recorded; },
       }) {
    const bool is_plain = recorded.empty();
    auto [one, other] = with_tls(unix_pair());
    Records records;
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK_EQ(one.send(std::span(bytes).subspan(1000 * i, 1000)), 1000);
      records.emplace_back(4096);
      const ssize_t length = ::recv(other.get(), records[i].data(), 4096, MSG_DONTWAIT);
      CHECK(length > 1000);
      records[i].resize(static_cast<std::size_t>(length));
    }
    deed(records);
    for (const Bytes& each : records) {
      ::send(one.get(), each.data(), each.size(), MSG_NOSIGNAL);
    }
    Bytes room(5000);
    std::size_t arrived = 0;
    ssize_t part = 0;
    while ((part = other.receive(std::span(room).subspan(arrived))) > 0) {
      arrived += static_cast<std::size_t>(part);
    }
    CHECK_EQ(errno, is_plain ? EAGAIN : EBADMSG);
    CHECK(is_plain ? arrived == 3000 : arrived <= 1000);
    CHECK(std::ranges::equal(std::span(room).first(arrived), std::span(bytes).first(arrived)));
  }
}

/// A recording of all that a rank has sent is of no use against the same rank.
TEST(tls_refuses_a_recording) {
  Between way;
  CHECK_EQ(way.shake_hands(), "");
  auto [stranger, end] = unix_pair();
  auto accepting = Authentication::accepting(std::move(end), key_of(1), tls_of(1), kHello.to);
  for (const Bytes& record : way.seen[kUp]) {
    ::send(stranger.get(), record.data(), record.size(), MSG_NOSIGNAL);
  }
  try {
    for (int i = 0; i < 5; ++i) accepting.advance();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kPeerLost);
  }
  CHECK(!accepting.done());
}

TEST(tls_ends_strangers_and_waits_for_the_silent) {
  const Handshake plain = Handshake::connecting(key_of(1), kHello);
  const Bytes hello(plain.outgoing().begin(), plain.outgoing().end());
  const Bytes alert{std::byte{21}, std::byte{3}, std::byte{3}, std::byte{0},
                    std::byte{2},  std::byte{2}, std::byte{40}};
  for (const Bytes& said : {bytes_of("GET / HTTP/1.1\r\n\r\n"), hello, random_bytes(64), alert}) {
    for (const bool accepts : {true, false}) {
      auto [stranger, end] = unix_pair();
      auto rank = accepts
                      ? Authentication::accepting(std::move(end), key_of(1), tls_of(1), kHello.to)
                      : Authentication::connecting(std::move(end), key_of(1), tls_of(1), kHello);
      CHECK_EQ(rank.advance(), 0);
      CHECK(!rank.done() && !rank.sends());
      ::send(stranger.get(), said.data(), said.size(), MSG_NOSIGNAL);
      CHECK_THROWS(rank.advance(), ErrorKind::kPeerLost, "no rank of this job");
    }
  }
  auto [stranger, end] = unix_pair();
  auto rank = Authentication::accepting(std::move(end), key_of(1), tls_of(1), kHello.to);
  stranger.reset();
  CHECK_EQ(rank.advance(), ECONNRESET);
}

}  // namespace
}  // namespace torch_ring::test::tls_test
