// An alltoall where only some ranks have connections.
#pragma once

#include <vector>

#include "collective/communicator.h"

namespace torch_ring {

/// Which way the parts of an alltoall go, in three hops: inside the sender's host to the rank on
/// the receiver's lane, along that lane to the receiver's host, inside it to the receiver. Pure.
struct Routes {
  static constexpr int kHops = 3;

  std::vector<std::vector<int>> ranks_of_host;
  int lanes;  // the first ranks of each host drive its network; the others use theirs in turn

  /// Who has the part that `from` sends to `to` after so many hops.
  int holder(int from, int to, int hops) const;

  int size() const;
  int host_of(int rank) const;
  int index_of(int rank) const;  // among the ranks of its host
};

/// See Communicator::alltoall(). `host` joins the ranks of this host; `lane`, one rank a host in
/// the order of hosts, is null on a rank that drives no network. Every byte is copied twice more.
void routed_alltoall(const Routes& routes, int rank, Communicator& host, Communicator* lane,
                     const void* input, void* output, std::span<const std::size_t> bytes);

}  // namespace torch_ring
