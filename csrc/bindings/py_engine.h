// PyEngine: the engine as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ring {

void bind_engine(pybind11::module_& module);

}  // namespace torch_ring
