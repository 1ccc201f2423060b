// KeepAliveScope and OutputEvent: order between the caller's streams and the collectives' stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/request.h"

namespace torch_ring {

/// This thread's current stream on the device.
c10::Stream current_stream(c10::Device device);

/// Keeps a tensor's memory from being used for others until the stream has done what is on it when
/// the memory is freed. Does nothing for memory that the device's own allocator does not own.
void record_on_stream(const at::Tensor& tensor, c10::Stream stream);

/// The streams of one device on which something has been made that one stream will use.
/// Thread: one at a time.
class Producers {
 public:
  void add(c10::Stream stream);

  /// Makes `stream` wait for what is on the others now, and forgets them.
  void join(c10::Stream stream);

  void clear() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;  // each once
};

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

/// An event on the collectives' stream, recorded when a request's output on a device is written.
class OutputEvent {
 public:
  explicit OutputEvent(c10::Device device);

  /// Makes the request wait for the work that is on the current stream now, and this event for the
  /// request. The host waits for neither.
  void follow(Request& request);

  /// Whether the output has been written. Call this and wait() only when the request's work is
  /// done, which means enqueued.
  bool query() const { return event_->query(); }
  /// Makes the current stream wait for the output, and keeps `output` alive for that stream's work.
  void wait(const at::Tensor& output) const;

 private:
  c10::Device device_;
  std::shared_ptr<c10::Event> event_;
  std::optional<c10::Stream> home_;  // for which the caller allocated the output, if it did
};

}  // namespace torch_ring
