// BackwardPass: tells the backward passes of a process apart.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>
#include <thread>

namespace torch_ring {

/// Whether the graph that autograd runs in this thread is nested in another backward pass, as a
/// reentrant checkpoint's is. Call it from a hook or a callback of that graph.
///
/// Torch keeps the depth in the graph's task, and gives away the address of that task's exec_info_
/// alone.
inline bool is_nested() {
  const auto* const info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr) return false;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr std::size_t offset = offsetof(torch::autograd::GraphTask, exec_info_);
#pragma GCC diagnostic pop
  const auto* const task = reinterpret_cast<const torch::autograd::GraphTask*>(
      reinterpret_cast<const std::byte*>(info) - offset);
  return task->reentrant_depth_ > 0;
}

/// A backward pass as one of its threads sees it.
struct BackwardPass {
  int task;  // autograd's number; -1 outside of backward passes. The outermost one that is known
  std::thread::id thread;
  bool on_device;           // seen by a thread of a device, which autograd has for all passes
  bool has_nested = false;  // it has brought gradients of a nested one, and may bring them again

  static BackwardPass current() {
    const auto node = torch::autograd::get_current_node();
    return {torch::autograd::get_current_graph_task_id(), std::this_thread::get_id(),
            node && !node->device().is_cpu(), false};
  }

  /// Whether `other` runs at the same time as this pass, which has not ended. One thread runs
  /// several passes if they are nested, as in reentrant checkpoints: they are one pass, and `task`
  /// is the outer one as soon as the first inner one has ended. Of passes on devices it says no: a
  /// nested one may be in the thread of another device.
  bool is_beside(const BackwardPass& other) const {
    if (task == other.task || on_device || other.on_device) return false;
    return thread != other.thread || (other.task >= 0 && other.task < task);
  }
};

}  // namespace torch_ring
