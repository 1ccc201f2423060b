// SPDX-License-Identifier: Apache-2.0
// bind_store_call(): calls of a store of torch.distributed, and of the resolver, that their callers
// can give up.
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_ring {

/// Adds StoreCall (torch_ring/_C.pyi documents it).
void bind_store_call(pybind11::module_& module);

}  // namespace torch_ring
