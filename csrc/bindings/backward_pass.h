// BackwardPass: tells the backward passes of a process apart.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <thread>

namespace torch_ring {

/// A backward pass as one of its threads sees it.
struct BackwardPass {
  int task;  // autograd's number; -1 outside of backward passes
  std::thread::id thread;
  bool on_device;  // seen by a thread of a device, which autograd has for all passes

  static BackwardPass current() {
    const auto node = torch::autograd::get_current_node();
    return {torch::autograd::get_current_graph_task_id(), std::this_thread::get_id(),
            node && !node->device().is_cpu()};
  }

  /// Whether `other` runs at the same time as this pass, which has not ended. One thread runs
  /// several passes if they are nested, as in reentrant checkpoints: the inner one ends first. Of
  /// passes on devices it says no: a nested one may be in the thread of another device.
  bool is_beside(const BackwardPass& other) const {
    if (task == other.task || on_device || other.on_device) return false;
    return thread != other.thread || (other.task >= 0 && other.task < task);
  }
};

}  // namespace torch_ring
