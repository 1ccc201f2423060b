// SPDX-License-Identifier: Apache-2.0
#include "collective/ring_communicator.h"

#include "elements.h"
#include "test_world.h"

namespace torch_ring::test::ring_communicator_test {

namespace {

const Layout kRing{"ring", one_rank_a_host, {}, Sockets::kTcp};

}  // namespace

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
  for (int size = 2; size <= 4; ++size) {
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

TEST(ring_error_names_the_rank_lost_in_a_transfer_and_the_progress) {
  std::vector<World> worlds = make_worlds(one_rank_a_host(2), Sockets::kTcp);
  run_ranks(2, [&](int rank) {
    World& world = at(worlds, rank);
    Elements data(DType::kFloat32, 1u << 20);
    Waiting waiting;
    if (rank == 0) {
      const auto ring = make_communicator(world, patient(), waiting.abort);
      CHECK_THROWS(ring->allreduce(data.data(), data.data(), data.count(), {}),
                   ErrorKind::kPeerLost,
                   "connection to rank 1 (a thread) closed after 0.5 of 1.0 MiB received");
    } else {
      // Receives rank 0's whole chunk, and leaves after sending half of its own.
      Connection connection(*world.sockets, 0, 1, world.labels[0]);
      Bytes incoming(1u << 20);
      exchange(&connection, {data.data(), 512u << 10}, &connection, incoming, waiting.waiter);
    }
  });
}

}  // namespace torch_ring::test::ring_communicator_test
