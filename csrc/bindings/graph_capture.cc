#include "bindings/graph_capture.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace torch_ring {

namespace {

constexpr const char* kInstead =
    "Capture the model by torch.cuda.make_graphed_callables(), whose backward is one step of "
    "autograd, and leave gradients, collectives and step() outside of the graph";

/// torch.cuda.is_current_stream_capturing, or that of another type's module; None without one.
py::object capture_query(const char* type) {
  const py::object module = py::module_::import("torch").attr("get_device_module")(type);
  return py::getattr(module, "is_current_stream_capturing", py::none());
}

template <c10::DeviceType type>
bool is_captured() {
  const py::gil_scoped_acquire gil;
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  const py::object& query =
      storage
          .call_once_and_store_result(
              [] { return capture_query(c10::DeviceTypeName(type, /*lower_case=*/true).c_str()); })
          .get_stored();
  return !query.is_none() && query().template cast<bool>();
}

}  // namespace

std::optional<std::string> capture_problem(c10::Device device, Captured what) {
  const bool captured =
      device.is_cuda() ? is_captured<c10::DeviceType::CUDA>()
                       : device.is_privateuseone() && is_captured<c10::DeviceType::PrivateUse1>();
  if (!captured) return std::nullopt;
  const char* why = what == Captured::kCollective
                        ? "a collective cannot be captured into a CUDA graph: the ranks agree on "
                          "each before they run it, and a replay would agree with nobody. "
                        : "a backward pass of a DistributedOptimizer's parameters cannot be "
                          "captured into a CUDA graph: a replay runs no hooks, so its gradients "
                          "would not be averaged. ";
  return std::string(why) + kInstead;
}

}  // namespace torch_ring
