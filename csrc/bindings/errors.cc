// SPDX-License-Identifier: Apache-2.0
#include "bindings/errors.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <string>
#include <system_error>

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

class ErrorThroughTorch final : public torch::PyTorchError {
 public:
  explicit ErrorThroughTorch(const Error& error)
      : PyTorchError(error.what()), kind_(error.kind()) {}

  PyObject* python_type() override {
    return py::module_::import("torch_ring.errors").attr(python_name(kind_)).ptr();
  }

 private:
  ErrorKind kind_;
};

}  // namespace

std::exception_ptr through_torch(const Error& error) {
  return std::make_exception_ptr(ErrorThroughTorch(error));
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (ErrorThroughTorch& error) {
    PyErr_SetString(error.python_type(), error.what());
  } catch (const Error& error) {
    const auto errors = py::module_::import("torch_ring.errors");
    std::string text = error.what();
    // Python may add to the error of a failed collective, such as the file with the last
    // operations.
    if (error.kind() != ErrorKind::kInvalidArgument) {
      text += errors.attr("note_for_error")().cast<std::string>();
    }
    PyErr_SetString(py::object(errors.attr(python_name(error.kind()))).ptr(), text.c_str());
  } catch (const std::system_error& error) {  // a thread could not be started
    const auto text = "cannot start a thread: " + std::string(error.what());
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), text).ptr());
  }
}

}  // namespace torch_ring
