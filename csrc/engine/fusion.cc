#include "engine/fusion.h"

#include <tuple>

namespace torch_ring {

std::vector<std::vector<std::size_t>> plan_fusion(std::span<const Fingerprint* const> fingerprints,
                                                  std::size_t threshold_bytes) {
  const auto kind = [](const Fingerprint& f) {
    return std::tuple(f.dtype, f.op, f.prescale, f.postscale);
  };
  std::vector<std::vector<std::size_t>> groups;
  std::vector<std::size_t> group_bytes;
  for (std::size_t i = 0; i < fingerprints.size(); ++i) {
    const Fingerprint& f = *fingerprints[i];
    const std::size_t bytes = f.count() * size_of(f.dtype);
    std::size_t group = 0;
    while (group < groups.size() && (kind(*fingerprints[groups[group].front()]) != kind(f) ||
                                     group_bytes[group] + bytes > threshold_bytes)) {
      ++group;
    }
    if (group == groups.size()) {
      groups.emplace_back();
      group_bytes.push_back(0);
    }
    groups[group].push_back(i);
    group_bytes[group] += bytes;
  }
  return groups;
}

}  // namespace torch_ring
