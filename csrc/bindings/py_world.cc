#include "bindings/py_world.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <cmath>
#include <utility>

namespace torch_ring {

namespace {

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000.0)));
}

}  // namespace

EngineConfig engine_config_of(double timeout_s, std::string timeout_name, double stall_warning_s,
                              double fusion_window_s, std::size_t fusion_threshold_bytes) {
  EngineConfig config;
  config.timeout = milliseconds_of(timeout_s);
  config.timeout_name = std::move(timeout_name);
  config.stall_warning = milliseconds_of(stall_warning_s);
  config.fusion_window =
      std::chrono::microseconds(static_cast<std::int64_t>(fusion_window_s * 1e6));
  config.fusion_threshold_bytes = fusion_threshold_bytes;
  return config;
}

World world_of(int rank, const std::vector<int>& members, std::vector<int> host_of,
               std::vector<std::string> labels, bool may_spin,
               const std::shared_ptr<ControlPlane>& plane, std::uint64_t set, int width,
               const std::shared_ptr<PyHostMemory>& memory, const std::vector<std::int64_t>& slots,
               bool checksums, const EngineConfig& config) {
  World world;
  world.topology = {rank, std::move(host_of)};
  if (members.size() != world.topology.host_of.size()) {
    throw pybind11::value_error("host_of does not name every rank");
  }
  world.labels = std::move(labels);
  world.may_spin = may_spin;
  world.width = static_cast<std::size_t>(width);
  world.checksums = checksums;
  if (memory) memory->use(world, members, slots);
  if (plane) {
    world.sockets = sockets_of(plane, set, members, width);
    world.waits = waits_of(plane, set, members, config.patience());
  }
  return world;
}

}  // namespace torch_ring
