// KeepAliveScope and OutputEvent: what joins the caller's streams to that of the collectives.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/request.h"

namespace torch_ring {

/// The device's stream that this thread uses now.
c10::Stream current_stream(c10::Device device);

/// While this lives, tensors used by device work that this thread enqueues are kept alive in
/// `kept`.
class KeepAliveScope {
 public:
  explicit KeepAliveScope(std::vector<at::Tensor>& kept);
  ~KeepAliveScope();
  KeepAliveScope(const KeepAliveScope&) = delete;
  KeepAliveScope& operator=(const KeepAliveScope&) = delete;
};

/// Keeps a tensor in this thread's KeepAliveScope; does nothing without one, as on the host.
void keep_for_stream(const at::Tensor& tensor);

/// An event on the collectives' stream: the output of a request on a device has been written.
class OutputEvent {
 public:
  explicit OutputEvent(c10::Device device);

  /// Makes the request wait, when it begins, for the work that the current stream has so far, and
  /// this event for the request. The host waits for neither.
  void follow(Request& request);

  /// Whether the output has been written. This and wait() only when the request's work is done,
  /// which means enqueued.
  bool query() const { return event_->query(); }
  /// Makes the current stream wait for it, and one that may use `output`.
  void wait(const at::Tensor& output) const;

 private:
  c10::Device device_;
  std::shared_ptr<c10::Event> event_;
  std::optional<c10::Stream> home_;  // for which the output was allocated, if the caller did that
};

}  // namespace torch_ring
