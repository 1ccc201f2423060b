// SPDX-License-Identifier: Apache-2.0
#include "transport/connection.h"

#include <latch>
#include <optional>
#include <thread>

#include "elements.h"
#include "test_world.h"

namespace torch_ring::test::connection_test {
namespace {

constexpr std::size_t kMiB = 1u << 20;

Bytes pattern(std::size_t bytes, int seed) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 31 + i / 255 + seed);
  return data;
}

TEST(waiter_takes_what_has_come_even_after_an_abort) {
  Waiting waiting;
  waiting.abort.raise(Error(ErrorKind::kPeerLost, "rank 1 died"));
  const auto nothing_stuck = [] { return Standstill{}; };
  waiting.waiter.wait([] { return true; }, nothing_stuck);
  // wait() checks once, and once more before it would sleep.
  waiting.waiter.wait([looks = 0]() mutable { return ++looks > 1; }, nothing_stuck);
  CHECK_THROWS(waiting.waiter.wait([] { return false; }, nothing_stuck), ErrorKind::kPeerLost,
               "rank 1 died");
}

/// One of two ranks, with its connection to the other and its Waiter.
struct End {
  End(std::vector<Socket> sockets, int peer, std::chrono::milliseconds timeout, bool slow,
      const std::shared_ptr<Network>& network)
      : waiting(timeout),
        link(std::move(sockets), "rank " + std::to_string(peer) + " (a thread)", slow, network) {}

  void exchange(std::span<const std::byte> outgoing, std::span<std::byte> incoming,
                const std::function<void(std::size_t)>& received = {}) {
    torch_ring::exchange(&connection, outgoing, &connection, incoming, waiting.waiter, received);
  }

  Waiting waiting;
  Link link;
  Connection& connection = link.connection;
};

/// `timeout`: of end 0.
struct Pair {
  explicit Pair(Sockets sockets, std::chrono::milliseconds timeout = patient().timeout,
                int connections = 1, bool slow = false) {
    std::vector<Socket> of_end[2];
    for (int i = 0; i < connections; ++i) {
      auto [zero, one] = socket_pair(sockets);
      of_end[0].push_back(std::move(zero));
      of_end[1].push_back(std::move(one));
    }
    for (int end = 0; end < 2; ++end) {
      ends[end].emplace(std::move(of_end[end]), 1 - end, end == 0 ? timeout : patient().timeout,
                        slow && end == 0, sockets == Sockets::kUcx ? ucx_network(0) : nullptr);
    }
  }
  std::optional<End> ends[2];
};

/// Registers `body` for every kind of connection.
bool on_all_ways(const std::string& name, const std::function<void(Sockets)>& body) {
  add_test("connection over Unix sockets: " + name, [=] { body(Sockets::kUnix); });
  add_test("connection over TCP: " + name, [=] { body(Sockets::kTcp); });
  if (has_tls()) add_test("connection over TLS: " + name, [=] { body(Sockets::kTls); });
  return add_ucx_test("connection over UCX: " + name, [=] { body(Sockets::kUcx); });
}

void exchange_both_ways(Sockets sockets, int connections = 1, bool slow = false) {
  Pair pair(sockets, patient().timeout, connections, slow);
  // Much more than the sockets hold: a rank that only sent would block for ever.
  const Bytes data[2] = {pattern(9 * kMiB + 1, 0), pattern(5 * kMiB + 3, 1)};
  run_ranks(2, [&](int rank) {
    Bytes incoming(data[1 - rank].size());
    std::size_t last = 0;
    pair.ends[rank]->exchange(data[rank], incoming, [&](std::size_t bytes) {
      CHECK(bytes > last);
      last = bytes;
    });
    CHECK_EQ(last, incoming.size());
    CHECK(same(incoming, data[1 - rank]));
  });
}

[[maybe_unused]] const bool added_both_ways =
    on_all_ways("exchange both ways", [](Sockets sockets) { exchange_both_ways(sockets); });

TEST(connection_exchange_both_ways_over_three_sockets) {
  exchange_both_ways(Sockets::kTcp, 3);
  if (has_tls()) exchange_both_ways(Sockets::kTls, 3);
}

TEST(connection_exchange_begins_when_the_sockets_are_there) {
  exchange_both_ways(Sockets::kUnix, 2, true);
}

/// With TLS the second byte waits where poll() does not see it.
TEST(connection_is_readable_while_received_bytes_are_left) {
  for (const Sockets sockets : {Sockets::kTcp, Sockets::kTls}) {
    if (sockets == Sockets::kTls && !has_tls()) continue;
    Pair pair(sockets);
    Connection& connection = pair.ends[0]->connection;
    pair.ends[1]->exchange(pattern(2, 0), {});
    std::byte byte{};
    while (connection.try_receive({&byte, 1}) == 0) std::this_thread::yield();
    CHECK(connection.readable());
    CHECK_EQ(connection.try_receive({&byte, 1}), 1u);
    CHECK(!connection.readable());
  }
}

TEST(connection_is_readable_with_data_or_end_of_stream) {
  Pair pair(Sockets::kUnix);
  std::byte byte{7};
  CHECK(!pair.ends[0]->connection.readable());
  CHECK_EQ(pair.ends[0]->connection.try_receive({&byte, 1}), 0u);
  pair.ends[1]->exchange({&byte, 1}, {});
  CHECK(pair.ends[0]->connection.readable());
  pair.ends[0]->exchange({}, {&byte, 1});
  CHECK(!pair.ends[0]->connection.readable());
  pair.ends[1].reset();
  CHECK(pair.ends[0]->connection.readable());
  CHECK_EQ(pair.ends[0]->connection.try_receive({}), 0u);
}

[[maybe_unused]] const bool added_end =
    on_all_ways("the end of the stream comes after the last byte", [](Sockets sockets) {
      Pair pair(sockets);
      const Bytes data = pattern(1000, 0);
      run_ranks(2, [&](int rank) {
        if (rank == 1) {
          pair.ends[1]->exchange(data, {});
          pair.ends[1].reset();
          return;
        }
        Bytes incoming(1000);
        pair.ends[0]->exchange({}, incoming);
        CHECK(same(incoming, data));
        CHECK_THROWS(pair.ends[0]->exchange({}, incoming), ErrorKind::kPeerLost,
                     "connection to rank 1 (a thread) closed after 0 of 1000 bytes received");
      });
    });

[[maybe_unused]] const bool added_lost =
    on_all_ways("the error of a lost peer names it and the progress", [](Sockets sockets) {
      Pair pair(sockets);
      const Bytes data = pattern(3 * kMiB / 2, 0);
      run_ranks(2, [&](int rank) {
        if (rank == 1) {
          pair.ends[1]->exchange(data, {});
          pair.ends[1].reset();
        } else {
          Bytes incoming(4 * kMiB);
          CHECK_THROWS(pair.ends[0]->exchange({}, incoming), ErrorKind::kPeerLost,
                       "connection to rank 1 (a thread) closed after 1.5 of 4.0 MiB received");
        }
      });
      const auto send_on = [&] {
        while (true) pair.ends[0]->exchange(data, {});  // the first bytes may still be sent
      };
      CHECK_THROWS(send_on(), ErrorKind::kPeerLost,
                   sockets == Sockets::kUcx
                       ? "connection to rank 1 (a thread) closed after 0.0 of 1.5"
                       : "connection to rank 1 (a thread) failed: ");
    });

/// Receives a byte at end 0, without a time limit.
std::byte receive_byte(Pair& pair) {
  std::byte byte{};
  while (pair.ends[0]->connection.receive_data({&byte, 1}) == 0) std::this_thread::yield();
  return byte;
}

[[maybe_unused]] const bool added_timeout =
    on_all_ways("the error of a timeout names the peer and the progress", [](Sockets sockets) {
      Pair pair(sockets, std::chrono::milliseconds(50));
      std::latch sent(1);
      run_ranks(2, [&](int rank) {
        const Bytes data = pattern(1001, 0);
        if (rank == 1) {
          pair.ends[1]->exchange(data, {});
          sent.count_down();
          return;
        }
        CHECK(receive_byte(pair) == data.front());
        sent.wait();
        Bytes incoming(3000);
        CHECK_THROWS(
            pair.ends[0]->exchange({}, incoming), ErrorKind::kTimeout,
            "no progress for 0.05 s (TORCH_RING_TIMEOUT): 1.0 of 2.9 KiB received from rank 1 "
            "(a thread)");
      });
    });

[[maybe_unused]] const bool added_aborted =
    on_all_ways("an exchange throws the abort's cause", [](Sockets sockets) {
      Pair pair(sockets);
      std::latch waiting(1);
      run_ranks(2, [&](int rank) {
        End& end = *pair.ends[0];
        if (rank == 0) {
          Bytes incoming(1);
          waiting.count_down();
          CHECK_THROWS(end.exchange({}, incoming), ErrorKind::kPeerLost, "rank 7 was killed");
        } else {
          waiting.wait();
          end.waiting.abort.raise(Error(ErrorKind::kPeerLost, "rank 7 was killed"));
          end.waiting.doorbell.wake();
        }
      });
    });

// A rank that gives up frees its tensors, so no transfer may read or write them afterwards.
[[maybe_unused]] const bool added_given_up =
    on_all_ways("a failed exchange leaves its bytes alone", [](Sockets sockets) {
      Pair pair(sockets, std::chrono::milliseconds(50));
      const Bytes data = pattern(9 * kMiB, 0);
      std::latch given_up(1);
      run_ranks(2, [&](int rank) {
        if (rank == 0) {
          CHECK(receive_byte(pair) == std::byte{7});
          Bytes outgoing = data;
          CHECK_THROWS(pair.ends[0]->exchange(outgoing, {}), ErrorKind::kTimeout, "no progress");
          std::ranges::fill(outgoing, std::byte{0xff});
          pair.ends[0].reset();
          given_up.count_down();
          return;
        }
        const std::byte seven{7};
        pair.ends[1]->exchange({&seven, 1}, {});
        given_up.wait();
        Bytes incoming(data.size());
        std::size_t arrived = 0;
        CHECK_THROWS(
            pair.ends[1]->exchange({}, incoming, [&](std::size_t bytes) { arrived = bytes; }),
            ErrorKind::kPeerLost, "connection to rank 0 (a thread) ");
        incoming.resize(arrived);
        CHECK(same(incoming, Bytes(data.begin(), data.begin() + static_cast<long>(arrived))));
      });
    });

// Over UCX the last sent bytes may still lie in UCX's buffers. Nothing moves them between
// exchanges, so an exchange must not end before they are delivered.
[[maybe_unused]] const bool added_tail =
    on_all_ways("a sender that waits for nothing has sent everything", [](Sockets sockets) {
      Pair pair(sockets);
      const Bytes data = pattern(9 * kMiB, 0);
      for (int turn = 0; turn < 10; ++turn) {
        std::latch has_come(2);
        run_ranks(2, [&](int rank) {
          Bytes incoming(rank == 0 ? data.size() : 0);
          pair.ends[rank]->exchange({data.data(), rank == 0 ? 0 : data.size()}, incoming);
          if (rank == 0) CHECK(same(incoming, data));
          has_come.arrive_and_wait();
        });
      }
    });

[[maybe_unused]] const bool added_in_turns =
    on_all_ways("bytes outside exchanges stay in order with these", [](Sockets sockets) {
      Pair pair(sockets);
      run_ranks(2, [&](int rank) {
        Connection& connection = pair.ends[rank]->connection;
        for (int turn = 0; turn < 5; ++turn) {
          const std::byte own{static_cast<unsigned char>(10 * turn + rank)};
          while (connection.try_send({&own, 1}) == 0) std::this_thread::yield();
          std::byte other{};
          while (connection.try_receive({&other, 1}) == 0) std::this_thread::yield();
          CHECK_EQ(static_cast<int>(other), 10 * turn + 1 - rank);
          const Bytes data = pattern(kMiB, rank + turn);
          Bytes incoming(kMiB);
          pair.ends[rank]->exchange(data, incoming);
          CHECK(same(incoming, pattern(kMiB, 1 - rank + turn)));
        }
      });
    });

[[maybe_unused]] const bool added_stranger =
    add_ucx_test("connection over UCX: an address without a proof is refused", [] {
      auto [here, there] = tcp_pair();
      Waiting waiting(patient().timeout);
      Link link(alone(std::move(here)), "rank 1 (a thread)", false, ucx_network(0));
      Key other{};
      other[0] = std::byte{1};
      ucx::UcxNetwork stranger(*ucx_api(), other, 0);
      const auto stream = stranger.stream(there.get(), 0, "rank 0 (a thread)");
      const auto greeting = stream->greeting();
      CHECK_EQ(::send(there.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL),
               static_cast<ssize_t>(greeting.size()));
      Bytes incoming(1);
      CHECK_THROWS(exchange(nullptr, {}, &link.connection, incoming, waiting.waiter),
                   ErrorKind::kMismatch, "does not prove that the address of its UCX is its own");
    });

}  // namespace
}  // namespace torch_ring::test::connection_test
