// BatchedCopy: gradients that are copied into their buckets together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace torch_ring {

/// Copies into the views of gradients. On the host each is made at once; those on a device are
/// collected and made by run(), as one operator for each device and dtype. On CUDA that is a kernel
/// for every 64 gradients.
///
/// Thread: one at a time; the copies are enqueued on its current streams. Blocking: no.
class BatchedCopy {
 public:
  /// Copies a gradient into its view, from any layout, dtype or device. It is kept until run(), and
  /// its memory until the copy has been made, if `stream` is the one that it belongs to. Without
  /// one, it belongs to the current stream.
  void copy(const at::Tensor& to, const at::Tensor& from,
            const std::optional<c10::Stream>& stream = std::nullopt);

  /// Makes a view zero.
  void zero(const at::Tensor& view);

  /// Enqueues what has been collected.
  void run();

 private:
  /// Tensors on one device, of one dtype.
  struct Batch {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    std::vector<at::Tensor> zero;
  };

  Batch& batch_of(const at::Tensor& view);

  std::vector<Batch> batches_;
};

}  // namespace torch_ring
