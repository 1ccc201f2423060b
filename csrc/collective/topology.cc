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
  std::vector<std::vector<int>> hosts(static_cast<std::size_t>(host_count()));
  for (int r = 0; r < size(); ++r) at(hosts, at(host_of, r)).push_back(r);
  return hosts;
}

int Topology::lanes() const {
  std::size_t smallest = host_of.size();
  for (const auto& ranks : hosts()) smallest = std::min(smallest, ranks.size());
  return static_cast<int>(smallest);
}

}  // namespace torch_ring
