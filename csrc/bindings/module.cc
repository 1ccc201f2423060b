// The native module, torch_ring._C. torch_ring/_C.pyi documents its functions.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <span>
#include <string_view>

#include "bindings/gradient_hooks.h"
#include "bindings/py_engine.h"
#include "bindings/result_allocator.h"
#include "collective/topology.h"
#include "nccl/loader.h"
#include "transport/host_memory.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

const char* python_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "InvalidArgumentError";
    case ErrorKind::kMismatch:
      return "MismatchError";
    case ErrorKind::kPeerLost:
      return "PeerLostError";
    case ErrorKind::kTimeout:
      return "TimeoutError";
    case ErrorKind::kInternal:
      break;
  }
  return "RingError";
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const auto type = py::module_::import("torch_ring.errors").attr(python_name(error.kind()));
    PyErr_SetString(type.ptr(), error.what());
  }
}

std::vector<int> lane_peers(int rank, std::vector<int> host_of) {
  return Topology{rank, std::move(host_of)}.lane_peers();
}

int make_memory(int ranks, const py::bytes& table) {
  const auto bytes = static_cast<std::string_view>(table);
  return HostMemory::create(ranks, std::as_bytes(std::span(bytes))).release();
}

py::bytes memory_table(int fd) {
  const std::vector<std::byte> table = HostMemory::read_table(fd);
  return {reinterpret_cast<const char*>(table.data()), table.size()};
}

}  // namespace

}  // namespace torch_ring

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace torch_ring;
  py::register_exception_translator(&translate);
  module.attr("BUILT_FOR_TORCH") = TORCH_VERSION;
  module.def("make_memory", &make_memory, py::arg("ranks"), py::arg("table"));
  module.def("memory_table", &memory_table, py::arg("fd"));
  module.def(
      "nccl_version", [](const std::string& library) { return nccl::load(library).version; },
      py::arg("library"));
  module.def("lane_peers", &lane_peers, py::arg("rank"), py::arg("host_of"));
  module.def("empty_result", &empty_result, py::arg("like"), py::arg("shape"));
  module.def("empty_result_like", &empty_result_like, py::arg("like"));
  module.def("keep_results", &keep_results, py::arg("most_bytes"));
  module.def("kept_result_bytes", &kept_result_bytes);
  bind_engine(module);
  bind_gradients(module);
}
