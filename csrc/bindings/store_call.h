// bind_store_call(): one call of a store of torch.distributed, or on the way to it, which its
// caller can give up.
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_ring {

/// Adds StoreCall (torch_ring/_C.pyi documents it).
void bind_store_call(pybind11::module_& module);

}  // namespace torch_ring
