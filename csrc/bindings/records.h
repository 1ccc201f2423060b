// bind_records(), totals_of(): the records of an engine's operations as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

#include "engine/recorder.h"

namespace torch_ring {

/// The sums as Python sees them: Engine.totals().
pybind11::dict totals_of(const OperationTotals& totals);

/// Adds OperationRecord and RecordStream (torch_ring/_C.pyi documents them).
void bind_records(pybind11::module_& module);

}  // namespace torch_ring
