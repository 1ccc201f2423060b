// bind_records(): the records of an engine's operations, and their stream, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_ring {

/// Adds OperationRecord and RecordStream (torch_ring/_C.pyi documents them).
void bind_records(pybind11::module_& module);

}  // namespace torch_ring
