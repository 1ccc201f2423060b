// plan_fusion(): which allreduces travel together. Pure.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/request.h"

namespace torch_ring {

/// Indices of `fingerprints`, in groups to be reduced as one buffer, ordered by their first member.
/// Members of a group have equal dtype, op and scaling and together at most `threshold_bytes`;
/// what is larger travels alone. Every request must be an allreduce.
std::vector<std::vector<std::size_t>> plan_fusion(std::span<const Fingerprint* const> fingerprints,
                                                  std::size_t threshold_bytes);

}  // namespace torch_ring
