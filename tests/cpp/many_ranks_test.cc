// SPDX-License-Identifier: Apache-2.0
// Collectives among 5 to 16 hosts, which choose other algorithms than few (collective/choice.h).

#include <latch>
#include <thread>

#include "collective/choice.h"
#include "communicator_suite.h"

namespace torch_ring::test::many_ranks_test {

namespace {

/// Parts of every rank; those of rank `empty` have no bytes.
void allgather_of_parts(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const std::size_t scale : {std::size_t{0}, std::size_t{1}, std::size_t{1500}}) {
      for (const int empty : {0, size - 1, size}) {  // at `size` no rank is empty
        std::vector<std::size_t> bytes;
        Bytes expected;
        for (int rank = 0; rank < size; ++rank) {
          bytes.push_back(rank == empty ? 0 : scale * static_cast<std::size_t>(rank % 5 + 1));
          const auto part = bytes_of(rank, bytes.back());
          expected.insert(expected.end(), part.begin(), part.end());
        }
        const int rank = communicator.rank();
        const auto input = bytes_of(rank, at(bytes, rank));
        Bytes output(expected.size());
        communicator.allgather(input.data(), output.data(), bytes);
        CHECK(same(output, expected));
      }
    }
  });
}

/// Data of each path, and more for those in segments.
void broadcast_on_every_path(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const auto& [bytes, path] : {std::pair{std::size_t{0}, BroadcastPath::kTree},
                                      {1, BroadcastPath::kTree},
                                      {70'001, BroadcastPath::kTree},
                                      {300'001, BroadcastPath::kScattered},
                                      {4'500'001, BroadcastPath::kChain}}) {
      CHECK(choose_broadcast(bytes, size) == path);
      for (int root = 0; root < size; root += bytes > 1'000'000 ? size - 1 : 1) {
        Bytes data = bytes_of(communicator.rank(), bytes);
        communicator.broadcast(data.data(), bytes, root);
        CHECK(same(data, bytes_of(root, bytes)));
      }
    }
  });
}

bool add_suite(const Layout& layout) {
  const auto add = [&](const char* name, void (*body)(const Layout&, int)) {
    add_for_sizes(layout, name, body);
  };
  add("allreduce of every dtype, op and edge", allreduce_all);
  add("allreduce longer than many segments", allreduce_long);
  add("allreduce scales before and after", allreduce_scaled);
  add("allreduce accumulates 16-bit floats in float32", allreduce_accumulates_in_float32);
  add("allreduce gives the same bits on all ranks and runs", allreduce_same_bits);
  add("broadcast on every path", broadcast_on_every_path);
  add("allgather of ragged and empty parts", allgather_of_parts);
  add("reduce of every dtype, op, edge and root", reduce_of_every_kind);
  add("reduce has the bits of an allreduce", reduce_has_the_bits_of_an_allreduce);
  add("gather and scatter of equal and ragged parts", gather_and_scatter);
  add("barrier holds all until the last", barrier_holds_all);
  add("agreement and data in turns", everything_in_turns);
  add("an abort ends a wait with its cause", an_abort_ends_a_wait);
  return true;
}

// Under sanitizers only the first size of a layout runs.
[[maybe_unused]] const bool added[] = {
    add_suite({"many ranks over tcp", one_rank_a_host, {9, 5, 8, 16}, Sockets::kTcp}),
    add_suite({"seven ranks, 3 connections", one_rank_a_host, {7}, Sockets::kTcp, false, 3}),
    add_suite({"six hosts of two ranks",
               [](int size) {
                 std::vector<int> host_of;
                 for (int rank = 0; rank < size; ++rank) host_of.push_back(rank / 2);
                 return host_of;
               },
               {12}}),
};

}  // namespace

TEST(many_ranks_learn_that_one_has_left_while_they_exchange) {
  constexpr std::size_t kCount = 100'000;
  constexpr int kRanks = 6;
  CHECK(choose_allreduce(kCount * 4, kRanks) == AllreducePath::kScattered);
  run_world({"ring", one_rank_a_host, {}, Sockets::kTcp}, kRanks,
            [](Communicator& communicator, Abort&) {
              Elements data(DType::kFloat32, kCount);
              const auto allreduce = [&] {
                communicator.allreduce(data.data(), data.data(), data.count(), {});
              };
              allreduce();
              if (communicator.rank() == 1) return;
              CHECK_THROWS(allreduce(), ErrorKind::kPeerLost, "connection to rank ");
            });
}

}  // namespace torch_ring::test::many_ranks_test
