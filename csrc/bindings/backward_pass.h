// BackwardPass: tells the backward passes of a process apart.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <thread>

namespace torch_ring {

/// A backward pass as one of its threads sees it.
struct BackwardPass {
  int task;  // autograd's number; -1 outside of backward passes
  std::thread::id thread;

  static BackwardPass current() {
    return {torch::autograd::get_current_graph_task_id(), std::this_thread::get_id()};
  }

  /// Whether `other` runs at the same time as this pass, which has not ended. One thread runs
  /// several passes if they are nested, as in reentrant checkpoints: the inner one ends first. (A
  /// thread of a device also runs the passes of several threads of the program in turns.)
  bool is_beside(const BackwardPass& other) const {
    if (task == other.task) return false;
    return thread != other.thread || (other.task >= 0 && other.task < task);
  }
};

}  // namespace torch_ring
