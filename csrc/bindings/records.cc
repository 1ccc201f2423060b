#include "bindings/records.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

namespace py = pybind11;

namespace torch_ring {

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
