#include "communicator_suite.h"

using namespace torch_ring;
using namespace torch_ring::test;

namespace {

std::vector<int> two_hosts(int size) {
  std::vector<int> host_of(static_cast<std::size_t>(size), 1);
  std::fill_n(host_of.begin(), (size + 1) / 2, 0);
  return host_of;
}

std::vector<int> two_hosts_in_turns(int size) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank % 2);
  return host_of;
}

// With 2 + 1 + 1 or 2 + 2 + 1 ranks: some drive no network.
std::vector<int> three_hosts(int size) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank * 3 / size);
  return host_of;
}

// Two ranks of a kind also spin, as ranks with cores of their own do.
[[maybe_unused]] const bool added[] = {
    add_communicator_suite({"shm", one_host}),
    add_communicator_suite({"spinning shm", one_host, {2}, Sockets::kUnix, true}),
    add_communicator_suite({"ring", one_rank_a_host}),
    add_communicator_suite({"ring over tcp", one_rank_a_host, {2, 3, 4}, Sockets::kTcp}),
    add_communicator_suite({"spinning ring", one_rank_a_host, {2}, Sockets::kTcp, true}),
    add_communicator_suite({"two hosts", two_hosts, {3, 4}}),
    add_communicator_suite({"two hosts in turns", two_hosts_in_turns, {4}, Sockets::kTcp}),
    add_communicator_suite({"three hosts", three_hosts, {4, 5}}),
};

}  // namespace
