// plan_fusion(): the groups of allreduces that share a buffer and travel together. Pure.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/request.h"

namespace torch_ring {

/// Indices of `fingerprints` in groups, each to be reduced as one buffer, ordered by their first
/// members. Members of a group have equal dtype, op and scaling, and together at most
/// `threshold_bytes`; a larger tensor is a group of its own. Every request must be an allreduce.
std::vector<std::vector<std::size_t>> plan_fusion(std::span<const Fingerprint* const> fingerprints,
                                                  std::size_t threshold_bytes);

}  // namespace torch_ring
