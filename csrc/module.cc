// SPDX-License-Identifier: Apache-2.0
// The native module, torch_ring._C. torch_ring/_C.pyi documents its functions.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <string>

#include "bindings/accelerator.h"
#include "bindings/blocking_call.h"
#include "bindings/errors.h"
#include "bindings/py_engine.h"
#include "bindings/py_timeline.h"
#include "bindings/py_world.h"
#include "bindings/requests.h"
#include "bindings/store_call.h"
#include "c10d/bind_ring_backend.h"
#include "core/failpoint.h"
#include "core/limits.h"
#include "engine/device.h"
#include "gradients/gradient_hooks.h"
#include "nccl/loader.h"
#include "ucx/loader.h"
#include "ucx/worker.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace torch_ring;
  py::register_exception_translator(&translate);
  module.attr("BUILT_FOR_TORCH") = TORCH_VERSION;
  module.def(
      "nccl_version", [](const std::string& library) { return nccl::load(library).version; },
      py::arg("library"));
  module.def(
      "ucx_found",
      [](const std::string& library) {
        const ucx::Api api = ucx::load(library);
        return std::tuple(api.version, api.path, ucx::Worker(api).transports());
      },
      py::arg("library"), py::call_guard<py::gil_scoped_release>());
  module.def("device_in_use", [] { return DeviceChoice::of_process()->chosen(); });
  module.def("empty_result_like", &empty_result_like, py::arg("like"));
  module.def("keep_results", &keep_results, py::arg("most_bytes"));
  module.def("kept_result_bytes", &kept_result_bytes);
  module.def(
      "await_calls",
      [](double patience_s) {
        return CountedCall::await_all(
            std::chrono::milliseconds(static_cast<std::int64_t>(patience_s * 1000.0)));
      },
      py::arg("patience_s"));
  module.def("forget_calls", &CountedCall::forget_all);
  module.def("arm_failpoints", &arm_failpoints, py::arg("spec"));
  module.def("limit_to_raise", &limit_to_raise, py::arg("error"));
  bind_control_plane(module);
  bind_host_memory(module);
  py::class_<LaunchOrder, std::shared_ptr<LaunchOrder>>(module, "LaunchOrder")
      .def(py::init<>())
      .def("share", &LaunchOrder::share);
  bind_timeline(module);
  bind_engine(module);
  bind_gradients(module);
  bind_store_call(module);
  bind_ring_backend(module);
}
