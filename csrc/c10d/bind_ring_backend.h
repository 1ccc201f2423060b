// SPDX-License-Identifier: Apache-2.0
// bind_ring_backend(): torch.distributed's backend, for Python.
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_ring {

void bind_ring_backend(pybind11::module_& module);

}  // namespace torch_ring
