// C++ exceptions that autograd converts to Python's.
#pragma once

#include <torch/csrc/Exceptions.h>

namespace torch_ring {

struct AssertionError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override { return PyExc_AssertionError; }
};
struct ValueError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override { return PyExc_ValueError; }
};
struct RuntimeError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override { return PyExc_RuntimeError; }
};

}  // namespace torch_ring
