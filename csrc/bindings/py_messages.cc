// SPDX-License-Identifier: Apache-2.0
#include "bindings/py_messages.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <string>

#include "bindings/blocking_call.h"
#include "bindings/py_engine.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

std::string state_of(const MessageRecord& record) {
  constexpr const char* kNames[] = {"posted", "matched", "finished", "failed"};
  return kNames[static_cast<std::size_t>(record.state)];
}

py::dict sums_of(const MessageTotals::Sums& sums) {
  py::dict one;
  one["messages"] = sums.messages;
  one["failed"] = sums.failed;
  one["bytes"] = sums.bytes;
  return one;
}

}  // namespace

int PyMessage::wait() const {
  {
    const BlockingCall no_gil;
    request_->wait(kCheckSignals);
  }
  return request_->spec().is_send ? *request_->spec().peer : request_->source();
}

py::dict totals_of(const MessageTotals& totals) {
  py::dict all;
  all["sent"] = sums_of(totals.sent);
  all["received"] = sums_of(totals.received);
  return all;
}

void bind_messages(py::module_& module) {
  py::class_<PyMessage>(module, "Message")
      .def("done", &PyMessage::done)
      .def("wait", &PyMessage::wait);
  py::class_<MessageRecord>(module, "MessageRecord")
      .def_readonly("number", &MessageRecord::number)
      .def_property_readonly("state", &state_of)
      .def_readonly("is_send", &MessageRecord::is_send)
      .def_readonly("peer", &MessageRecord::peer)
      .def_readonly("tag", &MessageRecord::tag)
      .def_property_readonly("dtype",
                             [](const MessageRecord& r) { return torch_ring::name_of(r.dtype); })
      .def_readonly("bytes", &MessageRecord::bytes)
      .def_property_readonly("description", &MessageRecord::describe)
      .def_readonly("posted_ns", &MessageRecord::posted)
      .def_readonly("matched_ns", &MessageRecord::matched)
      .def_readonly("finished_ns", &MessageRecord::finished)
      .def_readonly("error", &MessageRecord::error);
}

}  // namespace torch_ring
