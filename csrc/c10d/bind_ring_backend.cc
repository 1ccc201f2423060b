// SPDX-License-Identifier: Apache-2.0
#include "c10d/bind_ring_backend.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/py_engine.h"
#include "c10d/ring_backend.h"
#include "core/error.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

/// A Python object for threads without the GIL.
std::shared_ptr<py::object> shared(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (Py_IsInitialized() == 0) return;  // leaks it: the interpreter has ended
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

/// Throws an exception of torch_ring's as an Error, which any thread can convert back.
void throw_as_error(py::error_already_set& error) {
  const auto errors = py::module_::import("torch_ring.errors");
  const std::pair<const char*, ErrorKind> kinds[] = {
      {"InvalidArgumentError", ErrorKind::kInvalidArgument},
      {"MismatchError", ErrorKind::kMismatch},
      {"PeerLostError", ErrorKind::kPeerLost},
      {"TimeoutError", ErrorKind::kTimeout},
      {"RingError", ErrorKind::kInternal},
  };
  for (const auto& [name, kind] : kinds) {
    if (!error.matches(errors.attr(name))) continue;
    const auto text = py::str(error.value()).cast<std::string>();
    throw Error(kind, text.substr(0, text.find(errors.attr("NOTE").cast<std::string>())));
  }
}

double in_seconds_of(std::chrono::milliseconds timeout) {
  return static_cast<double>(timeout.count()) / 1000.0;
}

c10::intrusive_ptr<RingBackend> make_ring_backend(int rank, int size, py::object of_python,
                                                  py::function split,
                                                  c10::intrusive_ptr<c10d::Store> store,
                                                  double timeout_s) {
  RingBackend::Membership membership;
  const auto group = shared(std::move(of_python));
  membership.group = group;
  membership.connect = [group] {
    const py::gil_scoped_acquire gil;
    try {
      const auto engine = shared(group->attr("connect")());
      return std::shared_ptr<const PyEngine>(engine, &engine->cast<const PyEngine&>());
    } catch (py::error_already_set& error) {
      throw_as_error(error);
      throw;
    }
  };
  membership.leave = [group](const std::string& why) {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    group->attr("leave")(why);
  };
  membership.split = [split = shared(std::move(split))](
                         const c10::intrusive_ptr<c10d::Store>& of_part,
                         const std::vector<int>& ranks, std::chrono::milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    return (*split)(of_part, ranks, in_seconds_of(timeout)).cast<c10::intrusive_ptr<RingBackend>>();
  };
  membership.handle = [group] {
    const py::gil_scoped_acquire gil;
    return group->attr("handle")().cast<std::string>();
  };
  membership.reconfigure = [group](std::int64_t uuid, const std::vector<std::string>& handles,
                                   bool in_order, std::chrono::milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    const py::object given = in_order ? py::object(py::cast(handles)) : py::set(py::cast(handles));
    return group->attr("reconfigure")(uuid, given, in_seconds_of(timeout))
        .cast<std::pair<int, int>>();
  };
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000.0));
  return c10::make_intrusive<RingBackend>(rank, size, std::move(store), timeout,
                                          std::move(membership));
}

}  // namespace

void bind_ring_backend(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");  // defines the base classes
  // The destructor takes the GIL itself, in leave(); it may wait for the group's threads.
  py::class_<RingBackend, c10d::Backend, c10::intrusive_ptr<RingBackend>>(module, "RingBackend")
      .def(py::init(&make_ring_backend), py::arg("rank"), py::arg("size"), py::kw_only(),
           py::arg("group"), py::arg("split"), py::arg("store"), py::arg("timeout_s"))
      .def_property_readonly("group", [](const RingBackend& backend) {
        return *std::static_pointer_cast<py::object>(backend.group());
      });
}

}  // namespace torch_ring
