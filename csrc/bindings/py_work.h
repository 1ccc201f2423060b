// PyWork: a pending result as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/blocking_call.h"
#include "bindings/requests.h"
#include "engine/engine.h"

namespace torch_ring {

/// Runs Python's signal handlers (Ctrl-C) while a thread waits without the GIL.
inline void check_signals() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

inline const Engine::Interrupt kCheckSignals = check_signals;

/// Whether Python has other threads than this one: they may yet submit something.
inline bool has_other_threads() {
  const pybind11::gil_scoped_acquire gil;
  PyThreadState* const first = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  return PyThreadState_Next(first) != nullptr;
}

/// A work, its engine, and its result.
class PyWork {
 public:
  PyWork(std::shared_ptr<Engine> engine, std::shared_ptr<Work> work, std::shared_ptr<Result> result)
      : engine_(std::move(engine)), work_(std::move(work)), result_(std::move(result)) {}
  PyWork(PyWork&&) = default;
  PyWork& operator=(PyWork&&) = default;

  /// The caller may have been about to wait, and a signal handler has thrown meanwhile.
  ~PyWork() {
    if (work_ && !work_->done()) engine_->tend();
  }

  bool done() const {
    return work_->done() &&
           (!result_->output_event || work_->failed() || result_->output_event->query());
  }

  /// Waits, and returns the output. On a device the current stream waits for the output; the host
  /// waits only until it is enqueued.
  at::Tensor wait() const {
    {
      const BlockingCall no_gil;
      engine_->wait(*work_, kCheckSignals);
    }
    if (result_->output_event) {
      engine_->check();
      result_->output_event->wait(result_->tensor);
    }
    return result_->tensor;
  }

  std::vector<std::int64_t> received_splits() const { return result_->rows; }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Work> work_;
  std::shared_ptr<Result> result_;
};

/// A request and its result: one member of a group.
struct Member {
  Request request;
  std::shared_ptr<Result> result;
  c10::Device device;
};

inline std::string member_name(const std::string& group, std::size_t index) {
  return group.empty() ? group : group + "." + std::to_string(index);
}

inline std::shared_ptr<Result> result_in(const at::Tensor& output) {
  return std::make_shared<Result>(Result{output, {}});
}

}  // namespace torch_ring
