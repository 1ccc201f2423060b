#include "communicator_suite.h"

using namespace torch_ring;
using namespace torch_ring::test;

namespace {

// Two ranks of a kind also spin, as ranks with cores of their own do.
[[maybe_unused]] const bool added[] = {
    add_communicator_suite({"shm", one_host}),
    add_communicator_suite({"spinning shm", one_host, {2}, Sockets::kUnix, true}),
    add_communicator_suite({"ring", one_rank_a_host}),
    add_communicator_suite({"ring over tcp", one_rank_a_host, {2, 3, 4}, Sockets::kTcp}),
    add_communicator_suite({"spinning ring", one_rank_a_host, {2}, Sockets::kTcp, true}),
    add_communicator_suite(
        {"ring of 3 connections", one_rank_a_host, {3}, Sockets::kTcp, false, 3}),
    add_communicator_suite({"two hosts", two_hosts, {3, 4}}),
    add_communicator_suite({"two hosts in turns", two_hosts_in_turns, {4}, Sockets::kTcp}),
    add_communicator_suite({"three hosts", three_hosts, {4, 5}}),
};

[[maybe_unused]] const bool added_silence = [] {
  for (const Layout& layout : {Layout{"shm", one_host, {2}}, Layout{"ring", one_rank_a_host, {3}},
                               Layout{"two hosts", two_hosts, {3}}}) {
    add_for_sizes(layout, "silence in reducescatter and alltoall is a timeout",
                  silence_in_parts_is_a_timeout);
  }
  return true;
}();

}  // namespace

TEST(reducescatter_longer_than_a_ring_s_or_a_hierarchy_s_block) {
  run_world({"ring", one_rank_a_host}, 2, [](Communicator& communicator, Abort&) {
    if (kSanitized) return;  // sanitizers see the blocks of a hierarchy, below
    // Blocks of 1 MiB a part: the first rank's ends in the first one, the other's in the second.
    check_reducescatter(communicator, {}, [](std::size_t rank) { return rank == 0 ? 5 : 300'003; });
  });
  run_world({"two hosts", two_hosts}, 3, [](Communicator& communicator, Abort&) {
    // Blocks of 8 MiB of the whole: the second rank's part lies in both.
    check_reducescatter(communicator, {DType::kFloat64, ReduceOp::kSum, {}},
                        [](std::size_t rank) { return rank == 0 ? 1'000'000 : 70'000; });
  });
}
