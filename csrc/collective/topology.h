// Topology: which ranks share a host, and which are on one lane. Pure.
#pragma once

#include <vector>

#include "core/at.h"

namespace torch_ring {

/// The layout of the ranks, from the view of one of them.
struct Topology {
  int rank = 0;              // this process
  std::vector<int> host_of;  // rank -> host, hosts numbered in order of their first rank

  int size() const { return static_cast<int>(host_of.size()); }
  int host() const { return at(host_of, rank); }
  int host_count() const;
  std::vector<int> ranks_of_host(int host) const;

  /// The ranks of every host.
  std::vector<std::vector<int>> hosts() const;

  /// The number of lanes: as many as the smallest host has ranks. A lane is a ring of connections
  /// between one rank of each host: lane j joins the j-th ranks.
  int lanes() const;
};

}  // namespace torch_ring
