// SPDX-License-Identifier: Apache-2.0
// follow_with_span(): the spans of collectives in torch.profiler.
#pragma once

#include <cstdint>
#include <string>

#include "engine/recorder.h"
#include "engine/request.h"

namespace pybind11 {
class dict;
class module_;
}  // namespace pybind11

namespace torch_ring {

/// The process set of a span.
struct SpanGroup {
  std::uint64_t set;
  int rank;
  int size;
  std::string transport;
};

/// Opens the spans of a request, if a profiler is on, and closes them when the request ends. One
/// has the fields of torch's own collectives ("record_param_comms", which Kineto and Holistic Trace
/// Analysis read); the other has the kind of the request, "torch_ring: allreduce", and its
/// description as an argument. At their end there is a short one, "torch_ring: agreed", which also
/// has the number of the agreement, the same on all ranks. Cost without a profiler: the check for
/// one. Thread: the one that submits the request; the progress thread closes the spans.
void follow_with_span(Request& request, const SpanGroup& group);

/// The sums for Python: Engine.totals().
pybind11::dict totals_of(const OperationTotals& totals);

/// Adds OperationRecord and RecordStream (torch_ring/_C.pyi documents them).
void bind_records(pybind11::module_& module);

}  // namespace torch_ring
