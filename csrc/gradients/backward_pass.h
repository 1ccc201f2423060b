// BackwardPass: which backward pass of autograd a gradient belongs to.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <thread>

namespace torch_ring {

/// A backward pass, identified from one of its threads.
struct BackwardPass {
  int task;  // autograd's number of the outermost known graph; -1 outside of backward passes
  std::thread::id thread;
  bool on_device;           // identified in a device's thread, which runs all passes
  bool has_nested = false;  // a nested one has produced gradients in it, and may do so again
  c10::intrusive_ptr<c10::ivalue::Future> end;  // of its graph; null unless it is under way
  std::uint64_t agreement = 0;                  // the number of the one that will end it

  static BackwardPass current();

  /// Whether `other` runs at the same time as this pass, which has not ended. Nested passes in one
  /// thread, as in reentrant checkpoints, count as one pass; `task` is the outer one as soon as the
  /// first inner one has ended. False for passes on devices: a nested one may be in the thread of
  /// another device.
  bool is_beside(const BackwardPass& other) const {
    if (task == other.task || on_device || other.on_device) return false;
    return thread != other.thread || (other.task >= 0 && other.task < task);
  }
};

/// Whether the graph that autograd runs in this thread is nested in another backward pass, as a
/// reentrant checkpoint's is. Call it from a hook or a callback of that graph.
bool is_nested();

/// The end of the graph that autograd runs in this thread: an exception, or its gradients.
c10::intrusive_ptr<c10::ivalue::Future> current_end();

/// The exception that has ended a graph, as "ValueError: bad data"; empty if none has, or an
/// interrupt.
std::string failure_in(const c10::intrusive_ptr<c10::ivalue::Future>& end);

}  // namespace torch_ring
