// SPDX-License-Identifier: Apache-2.0
// Strangers and silent peers, which the control plane must not trust.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "control/message.h"
#include "control/options.h"
#include "control/outgoing.h"
#include "descriptors.h"
#include "forked.h"
#include "planes.h"
#include "recording_observer.h"

namespace torch_ring::test::control_strangers_test {
namespace {

Key the_key() {
  Key key{};
  key.fill(std::byte{7});
  return key;
}

Fd connect_to(const Address& address, bool unix) {
  const SocketAddress to = unix ? SocketAddress(address.socket) : SocketAddress(address.tcp[0]);
  Fd socket(::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(socket.get(), to.generic(), to.bytes) < 0) throw_errno("connect");
  return socket;
}

void send_all(const Fd& socket, const std::string& bytes) {
  ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

bool closed(const Fd& socket) {
  char buffer[256];
  const auto bytes = ::recv(socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  return bytes == 0 || (bytes < 0 && errno == ECONNRESET);
}

void shake_hands(Handshake& handshake, const Fd& socket) {
  wait_until(
      [&] {
        CHECK_EQ(advance_handshake(handshake, socket.get()), 0);
        return handshake.done();
      },
      "a handshake");
}

/// Authenticates as `rank` to rank 0.
Fd join_as(std::uint32_t rank, const Address& address) {
  Fd socket = connect_to(address, true);
  auto handshake = Handshake::connecting(the_key(), Hello{rank, 0, 0, Hello::kControl});
  shake_hands(handshake, socket);
  return socket;
}

/// A plane of rank 0, whose peers the test plays.
struct Alone {
  explicit Alone(int size, std::chrono::milliseconds heartbeat_timeout = std::chrono::minutes(1))
      : all(make_plane_options(std::vector<int>(static_cast<std::size_t>(size), 0),
                               heartbeat_timeout)),
        address(all[0].addresses[0]),
        plane(std::make_unique<ControlPlane>(std::move(all[0]))) {
    std::vector<int> members;
    for (int rank = 0; rank < size; ++rank) members.push_back(rank);
    plane->subscribe(0, members, recorder);
  }
  void wait_for(const std::string& event) {
    wait_until([&] { return recorder.times(event) > 0; }, event);
  }

  RecordingObserver recorder;
  std::vector<ControlOptions> all;  // of the others, which listen
  Address address;
  std::unique_ptr<ControlPlane> plane;
};

TEST(control_plane_drops_strangers) {
  Alone rank0(3);
  std::vector<Fd> strangers;
  std::mt19937 random(3);
  for (const bool unix : {true, false}) {
    for (int i = 0; i < 20; ++i) {
      strangers.push_back(connect_to(rank0.address, unix));
      std::string garbage(random() % 300 + 100, '\0');
      for (char& byte : garbage) byte = static_cast<char>(random());
      send_all(strangers.back(), garbage);
    }
  }
  for (const Fd& stranger : strangers)
    wait_until([&] { return closed(stranger); }, "it is dropped");
  // A lower rank, an invalid rank, this rank itself, and too high a channel: all with the key.
  for (const Hello& hello :
       {Hello{0, 0, 0, 0}, Hello{3, 0, 0, 0}, Hello{0xffffffff, 0, 0, 1}, Hello{1, 0, 0, 65}}) {
    const Fd socket = connect_to(rank0.address, true);
    auto handshake = Handshake::connecting(the_key(), hello);
    wait_until([&] { return advance_handshake(handshake, socket.get()) != 0 || handshake.done(); },
               "a handshake");
    wait_until([&] { return closed(socket); }, "it is dropped");
  }
  CHECK_EQ(rank0.plane->missing(), (std::vector<int>{1, 2}));
  const Fd peer = join_as(2, rank0.address);
  wait_until([&] { return rank0.plane->missing() == std::vector<int>{1}; }, "rank 2 is there");
  CHECK(rank0.recorder.events().empty());
}

/// A process that has read the key in a store is still no rank of this host.
TEST(control_plane_takes_ranks_of_its_host_over_the_unix_socket_only) {
  auto all = make_plane_options({0, 0, 1});
  const Address address = all[0].addresses[0];
  const ControlPlane plane(std::move(all[0]));
  for (const auto& [rank, unix] : {std::pair{1u, false}, std::pair{2u, true}}) {
    const Fd socket = connect_to(address, unix);
    auto handshake = Handshake::connecting(the_key(), Hello{rank, 0, 0, Hello::kControl});
    shake_hands(handshake, socket);
    wait_until([&] { return closed(socket); }, "it is dropped");
  }
  CHECK_EQ(plane.missing(), (std::vector<int>{1, 2}));
}

TEST(control_plane_drops_processes_of_other_users) {
  if (::getuid() != 0) return;  // it takes a second user
  const Alone rank0(2);
  CHECK(holds_in_child([&] {
    if (::setuid(65534) < 0) throw_errno("setuid");
    const Fd socket = connect_to(rank0.address, true);
    auto handshake = Handshake::connecting(the_key(), Hello{1, 0, 0, Hello::kControl});
    wait_until([&] { return advance_handshake(handshake, socket.get()) != 0 || handshake.done(); },
               "a handshake");
    return !handshake.done();
  }));
}

TEST(control_plane_serves_peers_while_strangers_say_nothing) {
  // Four times as many strangers as it admits at a time: the peer is behind them in the listener's
  // queue.
  const DescriptorLimit limit(1024);  // also for the other ends of the strangers' connections
  Alone rank0(2);
  limit.raise();
  std::vector<Fd> strangers;
  for (int i = 0; i < 1000; ++i) strangers.push_back(connect_to(rank0.address, true));
  CHECK(rank0.plane->descriptors().size() <= 3 + 256 + 1);
  const Fd peer = join_as(1, rank0.address);
  wait_until([&] { return rank0.plane->missing().empty(); }, "rank 1 is there");
}

TEST(control_plane_waits_out_a_lack_of_descriptors) {
  Alone rank0(2);
  Fd peer(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const DescriptorLimit limit(peer.get() + 1);  // no free descriptor
  const SocketAddress to(rank0.address.socket);
  CHECK_EQ(::connect(peer.get(), to.generic(), to.bytes), 0);
  auto handshake = Handshake::connecting(the_key(), Hello{1, 0, 0, Hello::kControl});
  CHECK_EQ(advance_handshake(handshake, peer.get()), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK_EQ(rank0.plane->missing(), std::vector<int>{1});
  limit.raise();
  shake_hands(handshake, peer);
  wait_until([&] { return rank0.plane->missing().empty(); }, "rank 1 is there");
}

TEST(control_plane_loses_a_silent_neighbour) {
  Alone rank0(2, std::chrono::milliseconds(200));
  const Fd peer = join_as(1, rank0.address);
  rank0.wait_for("lost 1");
  CHECK_EQ(rank0.recorder.text("lost 1"),
           "rank 1 (a thread) has not been heard for 0.2 s (TORCH_RING_HEARTBEAT_TIMEOUT): it is "
           "stopped, or its host is cut off");
  // The stopped peer can read this verdict when it continues.
  std::string received(4096, '\0');
  const auto bytes = ::recv(peer.get(), received.data(), received.size(), 0);
  received.resize(static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
  MessageParser parser(2);
  std::vector<Message> messages;
  wait_until(
      [&] {
        parser.append(received);
        received.assign(4096, '\0');
        const auto more = ::recv(peer.get(), received.data(), received.size(), MSG_DONTWAIT);
        received.resize(static_cast<std::size_t>(std::max<ssize_t>(more, 0)));
        while (auto message = parser.next()) messages.push_back(*message);
        return !messages.empty() && messages.back().kind == Message::Kind::kLost;
      },
      "the verdict");
  CHECK_EQ(messages.back().rank, 1);
  CHECK(messages.size() >= 4);  // heartbeats before the verdict
  // Its own verdict about rank 0 is ignored.
  std::string frame;
  Message::lost(0, 1, "has not been heard").append_to(frame);
  send_all(peer, frame);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_EQ(rank0.recorder.events().size(), 1u);
}

TEST(control_plane_loses_a_neighbour_that_sends_no_messages) {
  Alone rank0(3);
  const Fd one = join_as(1, rank0.address);
  const Fd two = join_as(2, rank0.address);
  send_all(one, std::string(Message::kHeaderBytes, 'X'));
  rank0.wait_for("lost 1");
  CHECK_EQ(rank0.recorder.text("lost 1"),
           "rank 1 (a thread) sent something that is no control message");
  std::string frames;
  Message::failed(2, 0, Error(ErrorKind::kInternal, "no memory")).append_to(frames);
  Message::departed(2).append_to(frames);
  send_all(two, frames);
  rank0.wait_for("departed 2");
  CHECK_EQ(rank0.recorder.text("failed 2 4"), "no memory");
}

TEST(control_plane_loses_a_neighbour_to_be_that_never_connects) {
  // Eight ranks; rank 3 is no neighbour of rank 0 before ranks 1 and 2 are lost. It listens, but is
  // stopped. Rank 5 has left: after the time to settle rank 0 notices that nobody listens there.
  Alone rank0(8, std::chrono::milliseconds(400));
  std::vector<Fd> peers;
  for (const std::uint32_t rank : {1, 2, 4, 6, 7}) peers.push_back(join_as(rank, rank0.address));
  wait_until([&] { return rank0.plane->missing().empty(); }, "all neighbours");
  rank0.all[5].unix_listener.reset();
  std::string frames;
  Message::departed(6).append_to(frames);
  send_all(peers[3], frames);
  frames.clear();
  Message::departed(7).append_to(frames);
  send_all(peers[4], frames);
  peers[0].reset();
  peers[1].reset();
  rank0.wait_for("lost 3");
  CHECK(rank0.recorder.text("lost 3").find("rank 3 (a thread) has not been heard for 0.4 s") == 0);
  rank0.wait_for("departed 5");
  CHECK_EQ(rank0.recorder.times("lost 5"), 0);
}

TEST(control_plane_loses_a_neighbour_to_be_that_has_died) {
  Alone rank0(8);
  std::vector<Fd> peers;
  for (const std::uint32_t rank : {1, 2, 4, 6, 7}) peers.push_back(join_as(rank, rank0.address));
  wait_until([&] { return rank0.plane->missing().empty(); }, "all neighbours");
  rank0.all[3].unix_listener.reset();
  peers[0].reset();
  peers[1].reset();
  rank0.wait_for("lost 3");
  CHECK_EQ(rank0.recorder.text("lost 3"),
           "rank 3 (a thread) died: nobody listens at its address any more; see its output");
}

}  // namespace
}  // namespace torch_ring::test::control_strangers_test
