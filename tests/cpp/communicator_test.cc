// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "collective/ring_communicator.h"
#include "communicator_suite.h"

namespace torch_ring::test::communicator_test {
namespace {

std::vector<int> pairs(int size) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank / 2);
  return host_of;
}

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
    // Five hosts and more choose other algorithms than few (collective/choice.h).
    add_communicator_suite({"ring of many", one_rank_a_host, {9, 8}, Sockets::kTcp}),
    add_communicator_suite({"three connections", one_rank_a_host, {7}, Sockets::kTcp, false, 3}),
    add_communicator_suite({"five hosts of two ranks", pairs, {10}}),
};

// Two sections; in the second layout the last rank has no chunk.
[[maybe_unused]] const bool added_sections = [] {
  add_for_sizes({"sections", one_rank_a_host, {18, 19}}, "the same bits at every place",
                same_bits_at_every_place);
  return true;
}();

[[maybe_unused]] const bool added_uneven = [] {
  const auto uneven = [](int) { return std::vector{0, 1, 1, 0, 0, 0, 2, 2, 0, 2}; };
  add_for_sizes({"uneven hosts", uneven, {10}}, "alltoall of ragged and empty parts", alltoall_all);
  return true;
}();

[[maybe_unused]] const bool added_silence = [] {
  for (const Layout& layout : {Layout{"shm", one_host, {2}}, Layout{"ring", one_rank_a_host, {3}},
                               Layout{"two hosts", two_hosts, {3}},
                               Layout{"ring over TLS", one_rank_a_host, {2}, Sockets::kTls},
                               Layout{"ring over UCX", one_rank_a_host, {3}, Sockets::kUcx}}) {
    add_for_sizes(layout, "silence is a timeout", silence_is_a_timeout);
  }
  return true;
}();

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

    check_allgather(communicator, {kLarge, 5, 300'001});
  });
}

const Layout kRing{"ring", one_rank_a_host, {}, Sockets::kTcp};

TEST(ring_allreduce_partial_is_unscaled_and_in_the_accumulation_dtype) {
  run_world(kRing, 3, [](Communicator& communicator, Abort&) {
    constexpr std::size_t kCount = 70'001;
    const auto value = [](int rank) { return 1 + rank + 1.0 / 4096; };  // not a float16
    Elements partial(DType::kFloat32, kCount);
    for (std::size_t i = 0; i < kCount; ++i) partial.set(i, value(communicator.rank()));
    const Scaling ignored{.prescale = 3, .postscale = 5, .divisor = 7};
    dynamic_cast<RingCommunicator&>(communicator)
        .allreduce_partial(partial.data(), kCount, {DType::kFloat16, ReduceOp::kSum, ignored});
    for (std::size_t i = 0; i < kCount; ++i) {
      CHECK_EQ(partial.at(i), value(0) + value(1) + value(2));
    }
  });
}

TEST(ring_allreduce_throws_on_all_ranks_when_one_has_left) {
  for (const int size : {2, 3, 4, 6}) {
    run_world(kRing, size, [](Communicator& communicator, Abort&) {
      Elements data(DType::kFloat32, kSanitized ? 1'000'000 : 3'000'000);
      const auto allreduce = [&] {
        communicator.allreduce(data.data(), data.data(), data.count(), {});
      };
      allreduce();
      if (communicator.rank() == 1) return;
      CHECK_THROWS(allreduce(), ErrorKind::kPeerLost, "connection to rank ");
    });
  }
}

}  // namespace
}  // namespace torch_ring::test::communicator_test
