#include "collective/topology.h"

#include <algorithm>

namespace torch_ring {

int Topology::host_count() const { return *std::max_element(host_of.begin(), host_of.end()) + 1; }

std::vector<int> Topology::ranks_of_host(int host) const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (at(host_of, r) == host) ranks.push_back(r);
  }
  return ranks;
}

std::vector<std::vector<int>> Topology::hosts() const {
  std::vector<std::vector<int>> hosts;
  for (int host = 0; host < host_count(); ++host) hosts.push_back(ranks_of_host(host));
  return hosts;
}

int Topology::lanes() const {
  std::size_t smallest = host_of.size();
  for (const auto& ranks : hosts()) smallest = std::min(smallest, ranks.size());
  return static_cast<int>(smallest);
}

bool Topology::needs_data(int peer) const {
  const auto lane_of = [&](int r) {
    const auto ranks = ranks_of_host(at(host_of, r));
    return std::find(ranks.begin(), ranks.end(), r) - ranks.begin();
  };
  return at(host_of, peer) != host() && lane_of(peer) == lane_of(rank) && lane_of(rank) < lanes();
}

std::vector<int> Topology::lane_peers() const {
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    if (needs_data(peer)) peers.push_back(peer);
  }
  return peers;
}

}  // namespace torch_ring
