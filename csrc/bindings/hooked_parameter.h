// HookedParameter: a parameter with hooks, and where its gradient lies.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "bindings/gradient_allocator.h"
#include "bindings/gradient_view.h"

namespace torch_ring {

/// One parameter of a GradientHooks. Its gradient lies in a part of a bucket; or, if it fills a
/// bucket alone, in a block of shared memory, where autograd may have computed it: then nothing is
/// copied, and `bucket_view` is the tensor that autograd has made. Between two steps such a block
/// belongs to `grad`, and goes when that goes.
///
/// Every use begins with `refresh`.
/// Thread: one at a time.
struct HookedParameter {
  HookedParameter(at::Tensor variable, std::string name);

  /// Finds out whether `bucket_view` still lies where it was made: the program may have given it
  /// other memory (`grad.data = ...`, or a module's double(), to() or share_memory()). Then it is
  /// somebody else's, and the view stays without it.
  void refresh();

  /// Receives what autograd has accumulated, `gradient` into `grad`; returns whether `grad` is
  /// another tensor than before.
  bool on_gradient(const at::Tensor& gradient);

  /// Copies the value of `grad` into the view and makes `grad` a tensor over it; returns whether
  /// `grad` was elsewhere.
  bool copy_in();

  /// Makes `grad` a tensor of zeros over the view.
  void make_zero();

  /// Hands a block over to `grad`, which owns it alone from then on.
  void release_to_grad();

  /// Whether the program, and no backward pass, has put something into the gradient in this step.
  /// A gradient that has been reduced in this step may be written to: it is clipped, say.
  bool written_by_hand() const;

  /// Multiplies a gradient that is equal on all ranks, before more is added to it.
  void rescale_reduced(double scale);

  bool in_block() const { return direct != nullptr; }
  std::uint32_t current_version() const;

  at::Tensor variable;
  // The accumulator lives as long as somebody holds it: a weak reference is all a tensor has.
  decltype(torch::autograd::impl::grad_accumulator(variable)) accumulator;
  std::string name;
  at::ScalarType dtype{};  // the variable's, when it was wrapped
  std::size_t bucket = 0;
  GradientView view;       // where the gradient lies
  at::Tensor bucket_view;  // a tensor over it, for `grad`; none if there is no block
  at::Tensor sparse;       // the gradient as we have left it, if it was sparse
  std::unique_ptr<DirectGradient> direct;  // if it fills a bucket alone
  // The tensor that `bucket_view` was when the block went to `grad`.
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> known;
  int passes = 0;             // since the step began
  bool unreduced = false;     // it has a gradient of this rank that is not reduced
  bool base_reduced = false;  // the value in `bucket_view` is the same on all ranks
  bool arrived = false;       // in the current pass
  // Of `bucket_view` when the step began; none once the gradient has been reduced in this step.
  std::optional<std::uint32_t> version;

 private:
  bool computed_in_block(const at::Tensor& gradient) const;
  void ensure_memory();
  void require_unchanged() const;
};

}  // namespace torch_ring
