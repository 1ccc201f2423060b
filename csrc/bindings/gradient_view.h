// GradientView: the part of a bucket in which a gradient lies.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_ring {

/// A part of a bucket, and how a gradient lies in it (DDP: gradient_as_bucket_view).
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

  /// Moves the view to `memory`, or to memory of torch's if that is null.
  void move_to(std::shared_ptr<void> memory);

  /// A new tensor over the view that serves as a `grad`. It is no view to autograd, and no more
  /// than its own elements are saved or copied with it.
  at::Tensor tensor() const;
};

/// The memory of a tensor that leaves no holes, in one dimension; a complex number is two real
/// ones.
at::Tensor flat(const at::Tensor& tensor);

/// Copies values between layouts, dtypes and devices; `from` may be sparse.
void copy_into(const at::Tensor& to, const at::Tensor& from);

}  // namespace torch_ring
