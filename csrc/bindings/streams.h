// Between the caller's streams and the one on which collectives run.
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

/// Where tensors are kept that the work uses which this thread enqueues on a device meanwhile.
class Keeping {
 public:
  explicit Keeping(std::vector<at::Tensor>& kept);
  ~Keeping();
  Keeping(const Keeping&) = delete;
  Keeping& operator=(const Keeping&) = delete;
};

/// Keeps a tensor there; none if there is no Keeping, which is so on the host.
void keep_for_stream(const at::Tensor& tensor);

/// When the output of a request on a device is there.
class Written {
 public:
  explicit Written(c10::Device device);

  /// Makes the request wait, when it begins, for what the current stream has been told so far, and
  /// this for the request. The host waits for neither.
  void follow(Request& request);

  /// Only when the request's work is done, which means enqueued:
  /// Whether the output has been written.
  bool query() const { return event_->query(); }
  /// Makes the current stream wait for it, and one that may use `output`.
  void wait(const at::Tensor& output) const;

 private:
  c10::Device device_;
  std::shared_ptr<c10::Event> event_;
  std::optional<c10::Stream> home_;  // for which the output was allocated, if the caller did that
};

}  // namespace torch_ring
