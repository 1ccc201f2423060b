// SPDX-License-Identifier: Apache-2.0
// The native module's Engine and Work.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/py_engine.h"
#include "bindings/py_messages.h"
#include "bindings/py_world.h"
#include "bindings/spans.h"
#include "bindings/sparse_sum.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

constexpr int kSum = static_cast<int>(ReduceOp::kSum);

std::unique_ptr<PyEngine> make_engine(
    int rank, std::vector<int> members, std::vector<int> host_of, std::vector<std::string> labels,
    bool may_spin, const std::shared_ptr<PyControlPlane>& plane, std::uint64_t set,
    const std::shared_ptr<PyHostMemory>& memory, const std::vector<std::int64_t>& slots,
    std::shared_ptr<LaunchOrder> launch_order, const py::object& config,
    const std::optional<std::string>& ucx_library, bool nccl_blocking, py::function log) {
  const std::shared_ptr<ControlPlane> control = plane ? plane->get() : nullptr;
  const EngineConfig read = engine_config_of(config);
  World world = world_of(rank, members, std::move(host_of), std::move(labels), may_spin, control,
                         set, memory, slots, ucx_library, read);
  const bool in_clear = read.tls == "1" && world.topology.host_count() > 1;
  return std::make_unique<PyEngine>(std::move(world), control, set, std::move(members), read,
                                    NcclSettings{read.nccl_library, nccl_blocking, in_clear},
                                    std::move(launch_order), std::move(log));
}

/// The arguments of Engine.submit() beside the tensors and the mode.
struct Asked {
  Fingerprint fingerprint;
  std::vector<std::int64_t> splits = {};
};

[[noreturn]] void refuse_type(std::string_view collective, const char* argument, const char* wanted,
                              py::handle given) {
  throw py::type_error(std::string(collective) + ": " + argument + " must be " + wanted + ", not " +
                       Py_TYPE(given.ptr())->tp_name);
}

/// A factor of a reduction.
double factor_of(std::string_view collective, const char* argument, py::handle given) {
  const double factor = PyFloat_AsDouble(given.ptr());
  if (factor != -1.0 || PyErr_Occurred() == nullptr) return factor;
  PyErr_Clear();
  refuse_type(collective, argument, "a number", given);
}

/// The arguments of Python's functions, of any type: pybind11's own errors would name neither the
/// function nor the argument.
struct Given {
  py::handle name;
  py::handle prescale;
  py::handle postscale;
};

Fingerprint asked(std::string_view collective, const Given& given, int op) {
  const auto* const found = std::ranges::find(kCollectives, collective, &CollectiveTraits::name);
  const auto index = static_cast<Collective>(found - kCollectives);
  if (index >= Collective::kJoin) refuse("no such collective: " + std::string(collective));
  Fingerprint asked{.collective = index,
                    .op = static_cast<ReduceOp>(op),
                    .prescale = factor_of(collective, "prescale_factor", given.prescale),
                    .postscale = factor_of(collective, "postscale_factor", given.postscale)};
  if (PyUnicode_Check(given.name.ptr())) {
    asked.name = given.name.cast<std::string>();
  } else if (!given.name.is_none()) {
    refuse_type(collective, "name", "a string", given.name);
  }
  return asked;
}

/// `options` have no arguments of their own: pybind11 looks up each name in each call, which takes
/// as long as a small barrier.
Asked asked(std::string_view collective, const Given& given, int op, const py::kwargs& options) {
  Asked all{asked(collective, given, op)};
  const CollectiveTraits& traits = traits_of(all.fingerprint.collective);
  for (const auto& [key, value] : options) {
    const auto option = key.cast<std::string_view>();
    try {
      if (option == "root" && traits.has_root) {
        all.fingerprint.root = value.cast<int>();
      } else if (option == "splits" && traits.sends == Sends::kRowsForEach) {
        all.splits = value.cast<std::vector<std::int64_t>>();
      } else if (option == "joinable" && traits.sends == Sends::kRows) {
        all.fingerprint.joinable = value.cast<bool>();
      } else {
        throw py::type_error(std::string(collective) + " has no option " + std::string(option));
      }
    } catch (const py::cast_error&) {
      throw py::type_error(std::string(collective) + ": " + std::string(option) +
                           " is of a wrong type, or too large");
    }
  }
  return all;
}

at::Tensor run(const PyEngine& engine, std::string_view collective,
               const std::optional<at::Tensor>& tensor, const std::optional<at::Tensor>& output,
               py::handle name, int root, int op, py::handle prescale, py::handle postscale) {
  Fingerprint all = asked(collective, {name, prescale, postscale}, op);
  all.root = root;
  return engine.run(std::move(all), tensor.value_or(at::Tensor()), output.value_or(at::Tensor()));
}

PyWork submit(const PyEngine& engine, std::string_view collective, std::optional<at::Tensor> tensor,
              std::optional<at::Tensor> output, py::handle name, bool blocking, int op,
              py::handle prescale, py::handle postscale, const py::kwargs& options) {
  auto [fingerprint, splits] = asked(collective, {name, prescale, postscale}, op, options);
  return engine.submit(std::move(fingerprint), std::move(tensor).value_or(at::Tensor()),
                       std::move(output).value_or(at::Tensor()), std::move(splits), blocking);
}

std::vector<PyWork> submit_group(const PyEngine& engine, std::string_view collective,
                                 const std::vector<at::Tensor>& tensors,
                                 const std::vector<at::Tensor>& outputs, py::handle name,
                                 bool blocking, int op, py::handle prescale, py::handle postscale,
                                 const py::kwargs& options) {
  const Asked all = asked(collective, {name, prescale, postscale}, op, options);
  if (!traits_of(all.fingerprint.collective).has_groups) {
    refuse(std::string(collective) + " has no groups");
  }
  return engine.submit_group(all.fingerprint, tensors, outputs, blocking);
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<CollectiveTraits>(module, "CollectiveTraits")
      .def_readonly("name", &CollectiveTraits::name)
      .def_readonly("torch", &CollectiveTraits::torch)
      .def_readonly("has_groups", &CollectiveTraits::has_groups);
  module.attr("COLLECTIVES") = std::vector(std::begin(kCollectives), std::end(kCollectives));
  bind_records(module);
  py::class_<PyWork>(module, "Work")
      .def("done", &PyWork::done)
      .def("wait", &PyWork::wait, py::arg("waited") = nullptr)
      .def("received_splits", &PyWork::received_splits);
  bind_messages(module);
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(module, "BlockPool");
  py::class_<PyEngine, std::shared_ptr<PyEngine>>(module, "Engine")
      .def(py::init(&make_engine), py::arg("rank"), py::arg("members"), py::arg("host_of"),
           py::arg("labels"), py::arg("may_spin"), py::arg("plane"), py::arg("number"),
           py::arg("memory"), py::arg("slots"), py::arg("launch_order"), py::arg("config"),
           py::kw_only(), py::arg("ucx_library"), py::arg("nccl_blocking"), py::arg("log"))
      .def("run", &run, py::arg(), py::arg() = py::none(), py::arg() = py::none(),
           py::arg() = py::none(), py::arg() = -1, py::arg() = kSum, py::arg() = 1.0,
           py::arg() = 1.0)
      .def("submit", &submit, py::arg(), py::arg() = py::none(), py::arg() = py::none(),
           py::arg() = py::none(), py::arg() = false, py::arg() = kSum, py::arg() = 1.0,
           py::arg() = 1.0)
      .def("submit_group", &submit_group, py::arg(), py::arg(), py::arg() = py::tuple(),
           py::arg() = py::none(), py::arg() = false, py::arg() = kSum, py::arg() = 1.0,
           py::arg() = 1.0)
      .def("join", &PyEngine::join)
      .def(
          "send",
          [](const PyEngine& engine, const at::Tensor& tensor, int destination, int tag) {
            return PyMessage(engine.send(tensor, destination, tag));
          },
          py::arg("tensor"), py::arg("destination"), py::arg("tag") = 0,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "receive",
          [](const PyEngine& engine, const at::Tensor& tensor, std::optional<int> source, int tag) {
            return PyMessage(engine.receive(tensor, source, tag));
          },
          py::arg("tensor"), py::arg("source"), py::arg("tag") = 0,
          py::call_guard<py::gil_scoped_release>())
      .def("end", &PyEngine::end, py::arg("why"))
      .def("empty_shared",
           py::overload_cast<const std::vector<std::int64_t>&, py::object>(&PyEngine::empty_shared,
                                                                           py::const_),
           py::arg("shape"), py::arg("dtype"))
      .def("gradient_blocks", &PyEngine::gradient_blocks)
      .def("vacant_gradient_bytes", &PyEngine::vacant_gradient_bytes)
      .def("records", &PyEngine::records)
      .def("totals", [](const PyEngine& engine) { return totals_of(engine.totals()); })
      .def("messages", &PyEngine::messages, py::call_guard<py::gil_scoped_release>())
      .def("message_totals",
           [](const PyEngine& engine) { return totals_of(engine.message_totals()); })
      .def("observe", &PyEngine::observe, py::arg("stream"))
      .def("has_shared_memory", &PyEngine::has_shared_memory)
      .def("overlaps", &PyEngine::overlaps)
      .def("shutdown", &PyEngine::shutdown, py::arg("removed") = false, py::arg("why") = "")
      .def("abandon", &PyEngine::abandon);
  module.def(
      "sparse_message",
      [](const std::optional<at::Tensor>& own, const at::Tensor& like, int op) {
        const SparseMessage message = sparse_message(own, like, static_cast<ReduceOp>(op));
        return std::pair(message.header, message.values);
      },
      py::arg("own"), py::arg("like"), py::arg("op"));
  module.def(
      "sparse_sum",
      [](const std::string& what, int op, const at::Tensor& like, const std::vector<int>& ranks,
         const at::Tensor& headers, const std::vector<std::int64_t>& lengths,
         const at::Tensor& values, std::optional<bool> is_coalesced) {
        return sparse_sum(what, static_cast<ReduceOp>(op), like, ranks, {headers, lengths, values},
                          is_coalesced);
      },
      py::arg("what"), py::arg("op"), py::arg("like"), py::arg("ranks"), py::arg("headers"),
      py::arg("lengths"), py::arg("values"), py::arg("is_coalesced"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace torch_ring
