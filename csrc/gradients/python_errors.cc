// SPDX-License-Identifier: Apache-2.0
#include "gradients/python_errors.h"

#include <torch/csrc/Exceptions.h>

namespace torch_ring {

namespace {

/// autograd lets it pass to Python, as an exception of the type `type()`.
template <PyObject* (*type)()>
struct PythonError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override { return type(); }
};

PyObject* assertion_error() { return PyExc_AssertionError; }
PyObject* value_error() { return PyExc_ValueError; }
PyObject* runtime_error() { return PyExc_RuntimeError; }

}  // namespace

void throw_assertion_error(const std::string& text) { throw PythonError<assertion_error>(text); }
void throw_value_error(const std::string& text) { throw PythonError<value_error>(text); }
void throw_runtime_error(const std::string& text) { throw PythonError<runtime_error>(text); }

}  // namespace torch_ring
