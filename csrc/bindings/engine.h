// The engine as Python sees it.
#pragma once

#include <torch/extension.h>

namespace torch_ring {

void bind_engine(pybind11::module_& module);

}  // namespace torch_ring
