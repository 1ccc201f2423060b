// SPDX-License-Identifier: Apache-2.0
#include "bindings/spans.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/dtypes.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

std::shared_ptr<torch::ParamCommsDebugInfo> fields_of(const Request& request,
                                                      const SpanGroup& group) {
  const Fingerprint& f = request.fingerprint;
  const CollectiveTraits& traits = traits_of(f.collective);
  const bool moves = traits.sends != Sends::kNothing;
  const auto given =
      moves ? static_cast<std::int64_t>(request.input_bytes() / size_of(f.dtype)) : 0;
  return std::make_shared<torch::ParamCommsDebugInfo>(
      std::make_tuple(std::to_string(group.set), "torch_ring, " + group.transport), group.rank,
      traits.span, given, given, scalar_type_of(f.dtype), std::vector<std::int64_t>{},
      std::vector<std::int64_t>{}, group.set == 0 ? 0 : -1, group.set == 0 ? 1 : -1, group.size);
}

/// The profiler sums up the spans of one name, so a name has no numbers: "torch_ring: allreduce".
std::string kind_of(const Fingerprint& f) {
  return "torch_ring: " + kind_in_words(f.name).value_or(name_of(f.collective));
}

/// The arguments of a span, which the profiler keeps with record_shapes=True.
using Arguments = std::unordered_map<std::string, c10::IValue>;

/// The two spans of a request, from its submission to its end.
class Spans {
 public:
  Spans(at::StepCallbacks&& comms, at::StepCallbacks&& named, const Request& request,
        const SpanGroup& group)
      : kind_(kind_of(request.fingerprint)),
        arguments_{{"operation", request.fingerprint.describe()}},
        fields_(fields_of(request, group)),
        named_(std::move(named)),
        comms_(std::move(comms)) {
    named_._setAsync();
    named_.before(kind_, &arguments_);
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PARAM_COMMS_INFO, fields_);
    comms_._setAsync();
    comms_.before(at::kParamCommsCallName);
  }
  ~Spans() { end(); }  // of a request that has failed
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  void end() {
    // The profiler reads the fields when the span ends, too, and assumes that there are some.
    mark_sequence();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PARAM_COMMS_INFO, fields_);
    comms_.end();
    named_.end();
  }

  std::uint64_t* sequence() { return &sequence_; }

 private:
  /// The profiler reads a span's fields when it begins, before the ranks agree, so the number gets
  /// a span of its own.
  void mark_sequence() {
    if (sequence_ == 0) return;
    at::RecordFunction mark(at::RecordScope::USER_SCOPE);
    arguments_["agreement"] = static_cast<std::int64_t>(sequence_);
    mark.before("torch_ring: agreed", &arguments_);
    sequence_ = 0;  // end() may be called again
  }

  const std::string kind_;
  Arguments arguments_;
  const std::shared_ptr<torch::ParamCommsDebugInfo> fields_;
  at::RecordFunction named_;
  at::RecordFunction comms_;
  std::uint64_t sequence_ = 0;  // 0: the ranks have not agreed
};

}  // namespace

void follow_with_span(Request& request, const SpanGroup& group) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  auto named = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!named) return;
  const auto spans =
      std::make_shared<Spans>(std::move(*callbacks), std::move(*named), request, group);
  request.sequence = spans->sequence();
  // The profiler needs its state in the thread that ends the span.
  const std::function<void()> end = at::wrapPropagateTLSState([spans] { spans->end(); });
  request.finish = [end, next = std::move(request.finish)] {
    if (next) next();
    end();
  };
}

namespace {

std::string name_of(OperationRecord::State state) {
  constexpr const char* kNames[] = {"submitted", "agreed", "started", "finished", "failed"};
  return kNames[static_cast<std::size_t>(state)];
}

std::string transport_of(const OperationRecord& record) {
  return record.fingerprint.on_host() ? torch_ring::name_of(record.transport) : "nccl";
}

/// Removes at most `most` records. The GIL is not needed to move them.
std::vector<OperationRecord> take(RecordStream& stream, std::size_t most) {
  std::vector<OperationRecord> records;
  stream.take(records, most);
  return records;
}

}  // namespace

py::dict totals_of(const OperationTotals& totals) {
  py::dict operations;
  for (std::size_t i = 0; i < totals.sums.size(); ++i) {
    const auto& sums = totals.sums[i];
    if (sums.operations == 0) continue;
    py::dict one;
    one["operations"] = sums.operations;
    one["failed"] = sums.failed;
    one["bytes"] = sums.bytes;
    one["waiting_ns"] = sums.waiting;
    one["running_ns"] = sums.running;
    operations[torch_ring::name_of(static_cast<Collective>(i))] = one;
  }
  py::dict all;
  all["operations"] = operations;
  all["inlined"] = totals.inlined;
  all["fused"] = totals.fused;
  all["lags"] = totals.lags;
  all["lag_ns"] = totals.lag;
  all["rounds"] = totals.rounds;
  return all;
}

void bind_records(py::module_& module) {
  const auto of_request = [](auto Fingerprint::* member) {
    return [member](const OperationRecord& record) { return record.fingerprint.*member; };
  };
  py::class_<OperationRecord>(module, "OperationRecord")
      .def_readonly("number", &OperationRecord::number)
      .def_readonly("sequence", &OperationRecord::sequence)
      .def_property_readonly("is_launched", &OperationRecord::is_launched)
      .def_readonly("round", &OperationRecord::round)
      .def_readonly("process_set", &OperationRecord::set)
      .def_property_readonly("state", [](const OperationRecord& r) { return name_of(r.state); })
      .def_property_readonly("transport", &transport_of)
      .def_property_readonly(
          "operation",
          [](const OperationRecord& r) { return torch_ring::name_of(r.fingerprint.collective); })
      .def_property_readonly(
          "dtype",
          [](const OperationRecord& r) { return torch_ring::name_of(r.fingerprint.dtype); })
      .def_property_readonly(
          "reduce_op",
          [](const OperationRecord& r) { return torch_ring::name_of(r.fingerprint.op); })
      .def_property_readonly("name", of_request(&Fingerprint::name))
      .def_property_readonly("shape", of_request(&Fingerprint::shape))
      .def_property_readonly("root", of_request(&Fingerprint::root))
      .def_property_readonly("group", of_request(&Fingerprint::group))
      .def_property_readonly("description",
                             [](const OperationRecord& r) { return r.fingerprint.describe(); })
      .def_readonly("bytes", &OperationRecord::bytes)
      .def_readonly("is_inline", &OperationRecord::is_inline)
      .def_readonly("is_fused", &OperationRecord::is_fused)
      .def_readonly("submitted_ns", &OperationRecord::submitted)
      .def_readonly("agreed_ns", &OperationRecord::agreed)
      .def_readonly("started_ns", &OperationRecord::started)
      .def_readonly("packed_ns", &OperationRecord::packed)
      .def_readonly("reduced_ns", &OperationRecord::reduced)
      .def_readonly("finished_ns", &OperationRecord::finished)
      .def_readonly("last_rank", &OperationRecord::last_rank)
      .def_readonly("lag_ns", &OperationRecord::lag)
      .def_readonly("error", &OperationRecord::error);
  py::class_<RecordStream, std::shared_ptr<RecordStream>>(module, "RecordStream")
      .def(py::init<std::size_t>(), py::arg("capacity"))
      .def("take", &take, py::arg("most"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("dropped", &RecordStream::dropped);
}

}  // namespace torch_ring
