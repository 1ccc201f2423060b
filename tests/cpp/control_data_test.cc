// SPDX-License-Identifier: Apache-2.0
// Data connections of the control plane.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <string>

#include "control/news.h"
#include "control/outgoing.h"
#include "descriptors.h"
#include "planes.h"
#include "recording_observer.h"
#include "tls_pair.h"

namespace torch_ring::test::control_data_test {
namespace {

constexpr std::uint64_t kSet = 5;

std::vector<Socket> take_all(SocketSource& source, int peer, bool needed) {
  std::vector<Socket> sockets;
  wait_until([&] { return !(sockets = source.take(peer, needed)).empty(); }, "a data connection");
  return sockets;
}

/// Checks that the sockets of both ranks have the same order, by a byte over each.
void check_same_order(std::vector<Socket>& one, std::vector<Socket>& other) {
  CHECK_EQ(one.size(), other.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    const char sent = static_cast<char>('a' + i);
    CHECK_EQ(one[i].send(std::as_bytes(std::span(&sent, 1))), 1);
    char received = 0;
    const auto room = std::as_writable_bytes(std::span(&received, 1));
    wait_until([&] { return other[i].receive(room) == 1; }, "a byte");
    CHECK_EQ(received, sent);
  }
}

TEST(control_plane_makes_data_connections_from_both_sides) {
  for (const auto& [one_host, tls] : {std::pair{true, true}, {false, false}, {false, true}}) {
    if (tls && !has_tls()) continue;
    for (const int width : {1, 3}) {
      const Planes planes = make_planes(one_host ? std::vector{0, 0, 0} : std::vector{0, 1, 2},
                                        std::chrono::minutes(1), tls);
      CHECK_EQ(planes[0]->cipher().empty(), one_host || !tls);
      const std::vector<int> members{2, 0};  // rank 0 of the set is rank 2 of the world
      const auto high = planes[2]->sockets(kSet, members, width);
      const auto low = planes[0]->sockets(kSet, members, width);
      CHECK(low->take(0, true).empty());
      CHECK(high->take(1, false).empty());
      std::vector<Socket> ours;
      std::vector<Socket> theirs;
      wait_until(
          [&] {
            if (ours.empty()) ours = high->take(1, true);
            if (theirs.empty()) theirs = low->take(0, true);
            return !ours.empty() && !theirs.empty();
          },
          "both ends");
      check_same_order(ours, theirs);
      check_same_order(theirs, ours);
      CHECK(low->take(0, false).empty());  // once
      for (const int rank : {2, 0}) {
        CHECK_EQ(at(planes, rank)->connections(), static_cast<std::uint64_t>(width));
      }
      CHECK_EQ(planes[1]->connections(), std::uint64_t{0});
      int domain = 0;
      socklen_t bytes = sizeof domain;
      CHECK_EQ(::getsockopt(ours[0].get(), SOL_SOCKET, SO_DOMAIN, &domain, &bytes), 0);
      CHECK_EQ(domain, one_host ? AF_UNIX : AF_INET);
    }
  }
}

TEST(control_plane_says_when_there_are_no_descriptors) {
  auto all = make_plane_options({0, 1});
  const SocketAddress rank0(all[0].addresses[0].tcp[0]);
  const Planes planes = start_planes(std::move(all));
  wait_until_complete(planes);
  const auto high = planes[1]->sockets(kSet, {0, 1}, 1);
  const auto low = planes[0]->sockets(kSet, {0, 1}, 1);
  {
    const DescriptorLimit none(Fd(::dup(STDIN_FILENO)).get());
    CHECK_THROWS(take_all(*high, 0, true), ErrorKind::kInternal,
                 "no connection to rank 0 (a thread): socket: Too many open files: raise `ulimit");
  }
  {
    // The accepting side notices it when somebody connects.
    const Fd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const DescriptorLimit none(stranger.get() + 1);
    CHECK_EQ(::connect(stranger.get(), rank0.generic(), rank0.bytes), 0);
    CHECK_THROWS(take_all(*low, 1, true), ErrorKind::kInternal,
                 "accept: Too many open files: raise `ulimit");
  }
  take_all(*high, 0, true);  // with descriptors again, a second attempt succeeds
  take_all(*low, 1, true);
}

TEST(control_plane_makes_no_data_connection_that_the_higher_rank_does_not_need) {
  const Planes planes = make_planes({0, 0});
  const auto high = planes[1]->sockets(kSet, {0, 1}, 1);
  const auto low = planes[0]->sockets(kSet, {0, 1}, 1);
  for (int i = 0; i < 20; ++i) {
    CHECK(low->take(1, true).empty());
    CHECK(high->take(0, false).empty());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK_EQ(planes[0]->descriptors().size(), 4u);  // wake-up, two listeners, the control connection
  CHECK(high->take(0, true).empty());
  take_all(*low, 1, false);
  take_all(*high, 0, false);
}

TEST(control_plane_keeps_data_connections_of_a_set_that_nobody_uses_yet) {
  RecordingObserver recorder;
  RecordingObserver high_recorder;
  const Planes planes = make_planes({0, 1});
  planes[1]->subscribe(kSet, {0, 1}, high_recorder);
  const auto high = planes[1]->sockets(kSet, {0, 1}, 3);
  auto ours = take_all(*high, 0, true);
  wait_until([&] { return high_recorder.times("connected") > 0; }, "its observer is told");
  // Rank 0 subscribes to the set afterwards.
  planes[0]->subscribe(kSet, {0, 1}, recorder);
  const auto low = planes[0]->sockets(kSet, {0, 1}, 3);
  auto theirs = take_all(*low, 1, false);
  check_same_order(ours, theirs);
  CHECK_EQ(high_recorder.times("connected"), 1);  // for all three together
}

TEST(control_plane_closes_data_connections_that_nobody_took_when_their_set_ends) {
  const Planes planes = make_planes({0, 0});
  for (const std::uint64_t number : numbers_of(kSet)) {  // messages go to the higher rank, too
    const int from = connects(number, 0, 1) ? 0 : 1;
    take_all(*at(planes, from)->sockets(number, {0, 1}, 1), 1 - from, true);
  }
  const auto open = [&] { return planes[0]->descriptors().size(); };
  wait_until([&] { return open() == 6 && planes[1]->descriptors().size() == 5; }, "all accepted");
  for (const auto& plane : planes) plane->leave(kSet, 0, 2);
  for (const auto& plane : planes) {
    wait_until([&] { return plane->has_ended(kSet); }, "the end of the set");
    CHECK_EQ(plane->descriptors().size(), 4u);  // as in a world without such a set
  }
}

TEST(control_plane_closes_the_data_connections_of_a_set_that_is_gone) {
  const Planes planes = make_planes({0, 0});
  const auto ours = take_all(*planes[1]->sockets(kSet, {0, 1}, 1), 0, true);
  wait_until([&] { return planes[0]->descriptors().size() == 5; }, "it is accepted");
  planes[0]->unsubscribe(kSet);
  CHECK_EQ(planes[0]->descriptors().size(), 4u);
  const auto closed = [](const Socket& socket) {
    char byte = 0;
    return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0;
  };
  wait_until([&] { return closed(ours[0]); }, "its end");
  // A later connection is refused: its other end closes.
  planes[1]->unsubscribe(kSet + 1);
  CHECK(planes[1]->sockets(kSet + 1, {0, 1}, 1)->take(0, true).empty());
  const auto late = take_all(*planes[1]->sockets(kSet, {0, 1}, 1), 0, true);
  wait_until([&] { return closed(late[0]); }, "the end of the later one");
}

TEST(control_plane_makes_no_data_connection_to_a_rank_that_is_gone) {
  RecordingObserver recorder;
  Planes planes = make_planes({0, 0});
  planes[1]->subscribe(kSet, {0, 1}, recorder);
  const auto high = planes[1]->sockets(kSet, {0, 1}, 1);
  planes[0].reset();
  wait_until([&] { return recorder.times("departed 0") > 0; }, "rank 0 leaves");
  CHECK_THROWS(high->take(0, true), ErrorKind::kPeerLost, "rank 0 (a thread): it has left");
  CHECK(planes[1]->descriptors().size() <= 4);
  planes[1]->stop();
  CHECK_THROWS(high->take(0, true), ErrorKind::kInternal, "has been stopped");
}

TEST(control_plane_keeps_the_last_data_of_a_rank_that_has_left) {
  for (const int sender : {0, 1}) {  // the rank that accepts, and the one that connects
    RecordingObserver recorder;
    Planes planes = make_planes({0, 1, 2});
    const int receiver = 1 - sender;
    at(planes, receiver)->subscribe(kSet, {0, 1}, recorder);
    const auto from = at(planes, sender)->sockets(kSet, {0, 1}, 1);
    const auto to = at(planes, receiver)->sockets(kSet, {0, 1}, 1);
    if (receiver == 1) CHECK(to->take(sender, true).empty());  // begins to connect
    const std::vector<Socket> ours = take_all(*from, receiver, true);
    CHECK_EQ(::send(ours[0].get(), "x", 1, MSG_NOSIGNAL), 1);
    at(planes, sender)->stop();
    const std::string departed = "departed " + std::to_string(sender);
    wait_until([&] { return recorder.times(departed) > 0; }, "the departure");
    const auto theirs = take_all(*to, sender, true);
    char received = 0;
    wait_until([&] { return ::recv(theirs[0].get(), &received, 1, MSG_DONTWAIT) == 1; }, "a byte");
    CHECK_THROWS(to->take(sender, true), ErrorKind::kPeerLost, "it has left");
    CHECK(to->take(sender, false).empty());
  }
}

/// The addresses of both ends of a TCP connection: "127.0.0.1 127.0.0.2".
std::string ends_of(const Socket& socket) {
  std::string text;
  for (const auto call : {&::getsockname, &::getpeername}) {
    sockaddr_in address{};
    socklen_t bytes = sizeof address;
    CHECK_EQ(call(socket.get(), reinterpret_cast<sockaddr*>(&address), &bytes), 0);
    std::array<char, INET_ADDRSTRLEN> host{};
    text += (text.empty() ? "" : " ");
    text += ::inet_ntop(AF_INET, &address.sin_addr, host.data(), host.size());
  }
  return text;
}

TEST(data_connections_use_the_network_interfaces_in_turn) {
  const Planes planes = start_planes(make_plane_options({0, 1}, std::chrono::minutes(1), 3));
  wait_until_complete(planes);
  const auto high = planes[1]->sockets(kSet, {0, 1}, 6);
  const auto low = planes[0]->sockets(kSet, {0, 1}, 6);
  const auto ours = take_all(*high, 0, true);
  const auto theirs = take_all(*low, 1, true);
  CHECK_EQ(ours.size(), 6u);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const std::string host = "127.0.0." + std::to_string(1 + i % 3);
    CHECK_EQ(ends_of(ours[i]), host + " " + host);
    CHECK_EQ(ends_of(theirs[i]), host + " " + host);
  }
}

TEST(data_connections_of_closed_sets_are_refused) {
  ControlOptions options;
  options.rank = 1;
  options.host_of = {0, 0, 0};
  DataConnections data(options);
  const auto accepts = [&](std::uint64_t set) {
    return data.accept(Hello{2, 1, set, 1}, Socket());
  };
  std::vector<std::uint64_t> sets(500);
  std::iota(sets.begin(), sets.end(), 1);
  std::ranges::shuffle(sets, std::mt19937(1));
  for (const std::uint64_t set : sets) {
    CHECK(accepts(set));
    data.close(set);
    CHECK(!accepts(set));
  }
  CHECK_EQ(data.closed_intervals(), 1u);  // in little memory
  for (const std::uint64_t set : {1, 250, 500}) CHECK(!accepts(set));
}

TEST(data_connections_are_limited_to_sane_names) {
  ControlOptions options;
  options.rank = 1;
  options.host_of = {0, 0, 0};
  DataConnections data(options);
  const auto hello = [](std::uint64_t set, std::uint32_t channel) {
    return Hello{2, 1, set, channel};
  };
  CHECK(!data.accept(hello(1, DataConnections::kChannels + 1), Socket()));
  CHECK(data.accept(hello(1, DataConnections::kChannels), Socket()));
  CHECK(data.accept(hello(1, DataConnections::kChannels), Socket()));  // replaces it
  for (std::uint64_t set = 2; set <= DataConnections::kUntaken; ++set) {
    CHECK(data.accept(hello(set, 1), Socket()));
  }
  CHECK(!data.accept(hello(1, 2), Socket()));
  CHECK_EQ(data.take(7, 2, 1).size(), 1u);
  CHECK(data.accept(hello(1, 2), Socket()));
  CHECK(!data.accept(hello(1, 3), Socket()));
  data.close(1);
  CHECK(!data.accept(hello(1, 3), Socket()));
  CHECK(data.accept(hello(7, 1), Socket()));
  CHECK(data.accept(hello(7, 2), Socket()));
  CHECK(!data.accept(hello(7, 3), Socket()));
}

}  // namespace
}  // namespace torch_ring::test::control_data_test
