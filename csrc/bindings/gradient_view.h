// GradientView: one gradient's part of a bucket.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_ring {

/// A part of a bucket and the layout of a gradient in it (DDP: gradient_as_bucket_view).
struct GradientView {
  at::Tensor bucket;
  std::byte* data = nullptr;
  at::DimVector sizes;
  at::DimVector strides;
  at::ScalarType dtype{};

  /// The view from element `offset` of `bucket` on, with the shape and, if they leave no holes,
  /// the strides of `variable`.
  static GradientView in(const at::Tensor& bucket, std::int64_t offset, const at::Tensor& variable);

  std::size_t bytes() const;

  /// Moves the view to `memory`, or to memory from torch if that is null.
  void move_to(std::shared_ptr<void> memory);

  /// A new tensor over the view, to be a `grad`. To autograd it is no view; saving or copying it
  /// takes its own elements only.
  at::Tensor tensor() const;
};

/// The memory of a tensor without holes, in one dimension; a complex number is two real ones.
at::Tensor flat(const at::Tensor& tensor);

/// Copies values between layouts, dtypes and devices; `from` may be sparse.
void copy_into(const at::Tensor& to, const at::Tensor& from);

}  // namespace torch_ring
