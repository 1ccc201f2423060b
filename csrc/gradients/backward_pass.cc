// SPDX-License-Identifier: Apache-2.0
#include "gradients/backward_pass.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>

namespace torch_ring {

namespace {

/// The task of the graph that autograd runs in this thread; null outside of hooks and callbacks.
/// torch exposes only the address of its exec_info_.
const torch::autograd::GraphTask* current_graph() {
  const auto* const info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr) return nullptr;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr std::size_t offset = offsetof(torch::autograd::GraphTask, exec_info_);
#pragma GCC diagnostic pop
  return reinterpret_cast<const torch::autograd::GraphTask*>(
      reinterpret_cast<const std::byte*>(info) - offset);
}

}  // namespace

BackwardGraph BackwardGraph::current() {
  const auto node = torch::autograd::get_current_node();
  return {torch::autograd::get_current_graph_task_id(), std::this_thread::get_id(),
          node && !node->device().is_cpu()};
}

bool is_nested() {
  const auto* const graph = current_graph();
  return graph != nullptr && graph->reentrant_depth_ > 0;
}

c10::intrusive_ptr<c10::ivalue::Future> current_end() {
  const auto* const graph = current_graph();
  return graph != nullptr ? graph->future_result_ : nullptr;
}

std::string failure_in(const c10::intrusive_ptr<c10::ivalue::Future>& end) {
  if (!end || !end->hasError()) return {};
  std::string type;
  std::string text;
  try {
    std::rethrow_exception(end->exception_ptr());
  } catch (const python_error& error) {
    const pybind11::gil_scoped_acquire gil;
    if (PyErr_GivenExceptionMatches(error.type, PyExc_KeyboardInterrupt) != 0) return {};
    type = error.type != nullptr ? PyExceptionClass_Name(error.type) : "Exception";
    text = error.what();
  } catch (const std::exception& error) {
    type = "RuntimeError";
    text = error.what();
  } catch (...) {
    return "Exception";
  }
  constexpr std::size_t longest = 200;
  text = text.substr(0, std::min(text.find('\n'), longest));
  return text.empty() ? type : type + ": " + text;
}

}  // namespace torch_ring
