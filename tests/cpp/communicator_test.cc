// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstring>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "collective/shm_communicator.h"
#include "communicator_suite.h"
#include "memory/cache_lines.h"

namespace torch_ring::test::communicator_test {

namespace {

// In the spinning layouts two ranks spin, like ranks with cores of their own.
[[maybe_unused]] const bool added[] = {
    add_communicator_suite({"shm", one_host}),
    add_communicator_suite({"spinning shm", one_host, {2}, Sockets::kUnix, true}),
    add_communicator_suite({"ring", one_rank_a_host, {1, 2, 3, 4}, Sockets::kTcp}),
    add_communicator_suite({"spinning ring", one_rank_a_host, {2}, Sockets::kUnix, true}),
    add_communicator_suite(
        {"ring with checksums", one_rank_a_host, {3}, Sockets::kTcp, false, 2, {}, true}),
    add_communicator_suite({"ring over TLS", one_rank_a_host, {3}, Sockets::kTls, false, 2}),
    add_communicator_suite({"two hosts", two_hosts, {3, 4}}),
    add_communicator_suite({"two hosts in turns", two_hosts_in_turns, {4}, Sockets::kTcp}),
    add_communicator_suite({"three hosts", three_hosts, {4, 5}}),
    add_communicator_suite({"ring over UCX", one_rank_a_host, {3, 2}, Sockets::kUcx}),
    add_communicator_suite(
        {"ring over UCX with checksums", one_rank_a_host, {3}, Sockets::kUcx, false, 2, {}, true}),
};

[[maybe_unused]] const bool added_silence = [] {
  for (const Layout& layout : {Layout{"shm", one_host, {2}}, Layout{"ring", one_rank_a_host, {3}},
                               Layout{"two hosts", two_hosts, {3}},
                               Layout{"ring over TLS", one_rank_a_host, {2}, Sockets::kTls},
                               Layout{"ring over UCX", one_rank_a_host, {3}, Sockets::kUcx}}) {
    add_for_sizes(layout, "silence is a timeout", silence_is_a_timeout);
  }
  return true;
}();

}  // namespace

TEST(reducescatter_longer_than_a_round_of_a_ring_or_a_hierarchy) {
  run_world({"ring", one_rank_a_host}, 2, [](Communicator& communicator, Abort&) {
    if (kSanitized) return;  // under sanitizers the hierarchy's rounds are enough
    // Rounds of 1 MiB a part: rank 0's part ends in the first round, rank 1's in the second.
    check_reducescatter(communicator, {}, [](std::size_t rank) { return rank == 0 ? 5 : 300'003; });
  });
  run_world({"two hosts", two_hosts}, 3, [](Communicator& communicator, Abort&) {
    // Rounds of 8 MiB of the whole tensor: rank 1's part lies in both.
    check_reducescatter(communicator, {DType::kFloat64, ReduceOp::kSum, {}},
                        [](std::size_t rank) { return rank == 0 ? 1'000'000 : 70'000; });
  });
}

TEST(shm_only_reader_owns_the_staged_cache_lines) {
  run_world({"shm", one_host}, 2, [](Communicator& communicator, Abort&) {
    constexpr std::size_t kBytes = 96u << 10;
    const auto& host = dynamic_cast<ShmCommunicator&>(communicator).host();
    std::byte* const staging = host.own_slot().segment(0);
    constexpr std::size_t kStagingBytes = Slot::kSegments * Slot::kSegmentBytes;
    constexpr auto kStaged = std::byte{0xff};
    std::vector<std::byte> data(kBytes, kStaged);
    std::vector<std::byte> result(2 * kBytes);

    const auto check = [&](std::size_t expected_bytes, auto&& collective) {
      std::memset(staging, 0, kStagingBytes);
      communicator.barrier();
      collective();
      communicator.barrier();
      std::size_t staged = 0;
      for (std::size_t line = 0; line < kStagingBytes; line += kCacheLine) {
        if (staging[line + 1] != kStaged) continue;
        staged += kCacheLine;
        CHECK(staging[line] == std::byte{0});
      }
      CHECK_EQ(staged, expected_bytes);
      communicator.barrier();
    };

    const std::vector<std::size_t> each(2, kBytes);
    const std::vector<std::size_t> half_to_each(4, kBytes / 2);
    const std::vector<std::size_t> halves(2, kBytes / 2);
    const Reduction maximum{DType::kUInt8, ReduceOp::kMax, {}};
    check(communicator.rank() == 1 ? kBytes : 0,
          [&] { communicator.broadcast(data.data(), kBytes, 1); });
    check(kBytes, [&] { communicator.allgather(data.data(), result.data(), each); });
    check(kBytes / 2, [&] { communicator.alltoall(data.data(), result.data(), half_to_each); });
    check(kBytes / 2,
          [&] { communicator.reducescatter(data.data(), result.data(), halves, maximum); });
    check(16u << 10, [&] { communicator.allreduce(data.data(), data.data(), 16u << 10, maximum); });
  });
}

TEST(shm_broadcast_root_stages_into_free_slots_without_waiting) {
  constexpr std::size_t kBytes = (Slot::kSegments - 2) * Slot::kSegmentBytes;
  EngineConfig config;
  config.timeout = std::chrono::seconds(2);
  std::latch root_is_done(1);
  const auto broadcast = [&](Communicator& communicator, Abort&) {
    Bytes data = bytes_of(communicator.rank(), kBytes);
    if (communicator.rank() == 0) {  // no peer reads meanwhile
      const std::shared_ptr<void> done(nullptr, [&](void*) { root_is_done.count_down(); });
      communicator.broadcast(data.data(), kBytes, 0);
    } else {
      root_is_done.wait();
      communicator.broadcast(data.data(), kBytes, 0);
    }
    CHECK(same(data, bytes_of(0, kBytes)));
  };
  run_world({"shm", one_host}, 2, broadcast, config);
}

TEST(shm_board_spins_for_the_given_time_before_it_sleeps) {
  Layout layout{"shm", one_host};
  layout.may_spin = true;
  run_world(layout, 2, [](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    const auto& waiting = dynamic_cast<ShmCommunicator&>(communicator).host().header(0);
    for (const std::chrono::microseconds spin :
         {std::chrono::seconds(5), std::chrono::seconds(0)}) {
      if (communicator.rank() == 0) {
        board.post({});
        while (!board.complete()) board.wait_until(kNever, spin);
        continue;
      }
      if (spin.count() == 0) {
        while (waiting.doorbell.state == Doorbell::kAwake) std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK_EQ(waiting.doorbell.state.load(), std::uint32_t{Doorbell::kAwake});
      }
      board.post({});
      wait_complete(board);
    }
  });
}

TEST(shm_large_results_by_nontemporal_copies_are_right) {
  run_world({"shm", one_host}, 3, [](Communicator& communicator, Abort&) {
    constexpr std::size_t kLarge = 17u << 20;
    constexpr std::size_t kFloats = kLarge / 4;
    check_allreduce(communicator, DType::kFloat32, ReduceOp::kSum, kFloats + 1, false);
    // Large results on two of the ranks only.
    check_reducescatter(communicator, {},
                        [](std::size_t rank) { return rank == 1 ? 1000 : kFloats; });
    check_alltoall(communicator,
                   [](std::size_t, std::size_t to) { return to == 1 ? 1000 : kLarge / 3 + 1; });
    Bytes data = bytes_of(communicator.rank(), kLarge);
    communicator.broadcast(data.data(), kLarge, 1);
    CHECK(same(data, bytes_of(1, kLarge)));

    const std::vector<std::size_t> lengths{kLarge, 5, 300'001};
    Bytes expected;
    for (int rank = 0; rank < communicator.size(); ++rank) {
      const Bytes part = bytes_of(rank, at(lengths, rank));
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const int rank = communicator.rank();
    const Bytes input = bytes_of(rank, at(lengths, rank));
    Bytes output(expected.size());
    communicator.allgather(input.data(), output.data(), lengths);
    CHECK(same(output, expected));
  });
}

}  // namespace torch_ring::test::communicator_test
