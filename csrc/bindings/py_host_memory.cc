#include "bindings/py_host_memory.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/at.h"
#include "core/error.h"
#include "transport/host_memory.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

int index_of(std::span<const int> ranks, int rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  if (found == ranks.end()) {
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank) + " is not on this host");
  }
  return static_cast<int>(found - ranks.begin());
}

int make_memory(int ranks, const py::bytes& table, std::size_t most_bytes) {
  const auto bytes = static_cast<std::string_view>(table);
  const std::size_t arena = HostMemory::arena_bytes(ranks, HostMemory::machine_bytes(), most_bytes);
  return HostMemory::create(ranks, std::as_bytes(std::span(bytes)), arena).release();
}

py::bytes memory_table(int fd) {
  const std::vector<std::byte> table = HostMemory::read_table(fd);
  return {reinterpret_cast<const char*>(table.data()), table.size()};
}

}  // namespace

PyHostMemory::PyHostMemory(Fd memory, std::vector<int> ranks, int rank)
    : ranks_(std::move(ranks)), host_(std::make_shared<HostMemory>(std::move(memory))) {
  if (host_->ranks() != static_cast<int>(ranks_.size())) {
    throw Error(ErrorKind::kInternal, "the memory of the host is for " +
                                          std::to_string(host_->ranks()) + " ranks, not for " +
                                          std::to_string(ranks_.size()));
  }
  for (int i = 0; i < host_->ranks(); ++i) {
    memories_.push_back(std::make_shared<const SharedMemory>(host_, i));
  }
  arena_ = std::make_shared<SharedArena>(at(memories_, index_of(ranks_, rank)));
}

void PyHostMemory::use(World& world, std::span<const int> members,
                       std::span<const std::int64_t> offsets) const {
  if (world.topology.host_count() == world.topology.size()) return;  // none shares a host
  for (const int rank : world.topology.ranks_of_host(world.topology.host())) {
    world.slots.push_back({at(memories_, index_of(ranks_, at(members, rank))),
                           static_cast<std::size_t>(at(offsets, rank))});
  }
  world.arena = arena_;
}

void bind_host_memory(py::module_& module) {
  module.def("make_memory", &make_memory, py::arg("ranks"), py::arg("table"),
             py::arg("most_bytes"));
  module.def("least_memory", &HostMemory::least_bytes, py::arg("ranks"));
  module.def("mappable_bytes", &HostMemory::mappable_bytes);
  module.def("memory_table", &memory_table, py::arg("fd"));
  py::class_<PyHostMemory, std::shared_ptr<PyHostMemory>>(module, "HostMemory")
      .def(py::init([](int fd, std::vector<int> ranks, int rank) {
             return std::make_shared<PyHostMemory>(Fd(fd), std::move(ranks), rank);
           }),
           py::arg("fd"), py::arg("ranks"), py::arg("rank"))
      .def("reserve_slot", &PyHostMemory::reserve_slot)
      .def("release_slot", &PyHostMemory::release_slot, py::arg("offset"))
      .def("used_bytes", &PyHostMemory::used_bytes)
      .def("abandon", &PyHostMemory::abandon);
}

}  // namespace torch_ring
