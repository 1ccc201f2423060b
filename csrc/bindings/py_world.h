// world_of() and engine_config_of(): what an engine is made from, of Python's arguments.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/py_control_plane.h"
#include "bindings/py_host_memory.h"
#include "collective/world.h"
#include "core/config.h"

namespace torch_ring {

/// The settings, from seconds; a timeout is rounded up to milliseconds.
EngineConfig engine_config_of(double timeout_s, std::string timeout_name, double stall_warning_s,
                              double fusion_window_s, std::size_t fusion_threshold_bytes);

/// The world of one of `members` (torch_ring/_C.pyi, Engine). `plane` and `memory` may be null.
/// Errors: ValueError if `host_of` does not name every member.
World world_of(int rank, const std::vector<int>& members, std::vector<int> host_of,
               std::vector<std::string> labels, bool may_spin,
               const std::shared_ptr<ControlPlane>& plane, std::uint64_t set, int width,
               const std::shared_ptr<PyHostMemory>& memory, const std::vector<std::int64_t>& slots,
               bool checksums, const EngineConfig& config);

}  // namespace torch_ring
