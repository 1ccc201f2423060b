// SPDX-License-Identifier: Apache-2.0
// Pass: a backward pass of an optimizer's parameters, and the graph of autograd that it belongs to.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace torch_ring {

/// A backward graph that autograd runs, identified from one of its threads.
struct BackwardGraph {
  int task;  // autograd's number of the outermost known graph; -1 outside of backward passes
  std::thread::id thread;
  bool on_device;  // identified in a device's thread, which runs all graphs

  static BackwardGraph current();

  /// Whether `other` runs at the same time as this one, which has not ended. Nested graphs in one
  /// thread, as in reentrant checkpoints, count as one; `task` is the outer one as soon as the
  /// first inner one has ended. False for graphs on devices: a nested one may be in the thread of
  /// another device.
  bool is_beside(const BackwardGraph& other) const {
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

/// The present backward pass of an optimizer's parameters, or the last one.
///
///             begin()                  close()
///     ended ───────────▶ under way ─────────────▶ ended
///
/// It begins with its first gradient, and ends with its graph, when the gradients that are due are
/// reduced, or because it has failed. Others accumulate.
struct Pass {
  bool is_under_way() const { return graph.has_value(); }

  /// `deciding`: the number of the agreement that will end it. Call it in a graph.
  void begin(BackwardGraph in, std::uint64_t deciding) {
    graph = in;
    end = current_end();
    agreement = deciding;
    has_nested = false;
    ++number;
  }

  /// `has_failed`: gradients are left that are not reduced.
  void close(bool failed) {
    graph.reset();
    end.reset();
    is_sent = false;
    arrived.clear();
    if (failed) late.clear();
    has_failed = failed;
  }

  std::uint64_t number = 0;                     // of the passes so far
  std::optional<BackwardGraph> graph;           // none: it has ended
  c10::intrusive_ptr<c10::ivalue::Future> end;  // of the graph
  std::uint64_t agreement = 0;                  // the number of the one that will end it
  bool has_nested = false;                      // nested graphs produce gradients in it, too
  std::vector<std::size_t> arrived;             // parameters, in order
  std::map<std::size_t, at::Tensor> late;       // by parameter: arrived after its bucket was sent
  bool is_sent = false;                         // a bucket was sent, and is not reduced yet
  bool has_failed = false;  // and has left gradients, which no step or zero_grad() has taken since

  // Of all passes so far:
  bool is_sent_in_vain = false;    // buckets of one were sent, and the agreed reduction has failed
  std::set<std::size_t> repeated;  // parameters with several gradients in one pass
};

}  // namespace torch_ring
