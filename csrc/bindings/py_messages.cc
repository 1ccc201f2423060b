#include "bindings/py_messages.h"

#include "bindings/blocking_call.h"
#include "bindings/py_work.h"

namespace py = pybind11;

namespace torch_ring {

int PyMessage::wait() const {
  {
    const BlockingCall no_gil;
    request_->wait(kCheckSignals);
  }
  return request_->spec().is_send ? *request_->spec().peer : request_->source();
}

void bind_messages(py::module_& module) {
  py::class_<PyMessage>(module, "Message")
      .def("done", &PyMessage::done)
      .def("wait", &PyMessage::wait);
}

}  // namespace torch_ring
