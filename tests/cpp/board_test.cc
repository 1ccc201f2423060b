// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "board_suite.h"
#include "collective/hierarchical_board.h"
#include "collective/tcp_board.h"
#include "test_world.h"

namespace torch_ring::test::board_test {
namespace {

constexpr std::uint64_t kRank0 = 0;    // the LeastWait of a frame's header: rank 0, 0 us
constexpr std::uint64_t kOneRank = 1;  // the beginning of a run's header

/// A board as rank 0 of two; the test plays rank 1, byte by byte.
struct Peer {
  Peer() {
    auto [here, there] = unix_pair();
    to_us.emplace(alone(std::move(here)), "rank 1 (a thread)");
    from_us.emplace(alone(std::move(there)), "rank 0 (a thread)");
    connection = &to_us->connection;
    us = &from_us->connection;
    board.emplace(0, std::vector<Connection*>{nullptr, connection}, waiting.waiter,
                  std::vector<std::uint32_t>{}, 1000);
  }

  void send(const std::vector<std::uint64_t>& words) {
    const auto bytes = std::as_bytes(std::span(words));
    CHECK_EQ(us->try_send(bytes), bytes.size());
  }

  Waiting waiting;
  std::optional<Link> to_us;
  std::optional<Link> from_us;
  Connection* connection = nullptr;
  Connection* us = nullptr;
  std::optional<TcpBoard> board;
};

void check_garbled(const std::vector<std::uint64_t>& frame, const std::string& what) {
  Peer peer;
  peer.board->post({});
  peer.send(frame);
  CHECK_THROWS(peer.board->complete(), ErrorKind::kPeerLost,
               "rank 1 (a thread) sent a garbled frame: " + what);
}

TEST(tcp_board_receives_a_frame_byte_by_byte_and_reads_no_further) {
  Peer peer;
  peer.board->post({});
  // Round 1, 24 bytes: one rank with a common part of 5 bytes and no own part.
  const std::vector<std::uint64_t> frame{
      1, kRank0, 24, kOneRank | 5ull << 32, 0, 0x0807060504030201};
  for (const std::byte& byte : std::as_bytes(std::span(frame))) {
    CHECK(!peer.board->complete());
    CHECK_EQ(peer.board->missing(), std::vector<int>{1});
    CHECK_EQ(peer.us->try_send({&byte, 1}), 1u);
  }
  peer.send({42});  // data after the frame
  CHECK(peer.board->complete());
  const Run run = run_of(peer.board->round(), 1);
  CHECK_EQ(run.common.size(), 5u);
  CHECK(run.common[4] == std::byte{5});
  CHECK(run.own.empty());
  std::uint64_t data = 0;
  CHECK_EQ(peer.connection->try_receive(std::as_writable_bytes(std::span(&data, 1))), 8u);
  CHECK_EQ(data, 42u);
}

TEST(tcp_board_throws_for_garbled_frames) {
  check_garbled({1, 2, 0}, "of a wait of rank 2, which there is not");
  check_garbled({1, kRank0, 1ull << 60}, "1152921504606846976 bytes for 1 entries");
  check_garbled({1, kRank0, 0}, "0 bytes for 1 entries");
  check_garbled({1, kRank0, 1032, 0}, "1032 bytes for 1 entries");
  check_garbled({2, kRank0, 16, kOneRank, 0}, "of round 2 in round 1");
  check_garbled({1, kRank0, 16, kOneRank | 1ull << 32, 0}, "an entry that does not fit");
  check_garbled({1, kRank0, 16, kOneRank | ~0ull << 32, 0}, "an entry that does not fit");
  check_garbled({1, kRank0, 24, kOneRank, 8, kOneRank | 1ull << 32}, "an entry that does not fit");
  check_garbled({1, kRank0, 16, 2, 0}, "entries of other ranks than its own");
  check_garbled({1, kRank0, 32, kOneRank, 0, kOneRank, 0}, "entries of other ranks than its own");
}

TEST(tcp_board_round_completes_though_its_peer_has_left) {
  Peer peer;
  peer.board->post({});
  peer.send({1, kRank0, 16, kOneRank, 0});
  Bytes taken(100);
  CHECK_EQ(peer.us->try_receive(taken), 40u);
  peer.from_us.reset();
  CHECK(peer.board->complete());
  CHECK(peer.board->peer_posted());  // the end of the stream counts as a post
  const auto next = [&] {
    peer.board->post({});
    wait_complete(*peer.board);
  };
  CHECK_THROWS(next(), ErrorKind::kPeerLost, "connection to rank 1 (a thread) ");
}

/// Checks that a member of a host refuses its leader's world slot with these words.
void check_refused(const std::vector<std::uint64_t>& words, const std::string& what) {
  std::vector<World> worlds = make_worlds({0, 0, 1});
  const SharedMemory& leader = *worlds[1].slots[0].memory;
  leader.commit(0, Slot::kBytes);
  Abort abort;
  const auto member = make_communicator(worlds[1], patient(), abort);
  member->board().post({});

  const Slot slot = leader.slot(0);
  std::memcpy(slot.world_entries(1), words.data(), words.size() * sizeof words[0]);
  slot.header().posted = 1;
  CHECK(!member->board().complete());
  slot.header().published = 1;
  CHECK_THROWS(member->board().complete(), ErrorKind::kInternal, what);
}

/// Three ranks with an empty entry each, as one group.
constexpr std::uint64_t kThreeRanks = 3;

TEST(hierarchical_board_believes_no_size_of_its_leader) {
  constexpr std::uint64_t kRoom = Slot::kWorldSlotBytes - sizeof(std::uint64_t);
  check_refused({kRoom + 1, kThreeRanks, 0}, "and " + std::to_string(kRoom) + " fit");
  check_refused({std::numeric_limits<std::uint64_t>::max(), kThreeRanks, 0}, "fit shared memory");
  check_refused({0}, "too few entries");
  check_refused({8, kThreeRanks}, "does not fit");
  check_refused({16, kThreeRanks | std::uint64_t{9} << 32, 0}, "does not fit");
  check_refused({16, kThreeRanks, std::numeric_limits<std::uint64_t>::max()}, "does not fit");
  check_refused({16, kThreeRanks + 1, 0}, "other ranks");
}

}  // namespace
}  // namespace torch_ring::test::board_test
