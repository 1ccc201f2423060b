// A parameter with hooks, and where its gradient lies.
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

/// One parameter of a GradientHooks. Its gradient lies in its place in a bucket; or, if it fills a
/// bucket alone, in a block of shared memory, where it may have been computed: then nothing is
/// copied, and `view` is the tensor that autograd has made. Between two steps such a block is left
/// to `grad`, and goes when that goes.
///
/// Every use begins with `keep_place`.
/// Thread: one at a time.
struct HookedParameter {
  HookedParameter(at::Tensor variable, std::string name);

  /// Finds out whether the tensor that was our `grad` is so still: the program may have given it
  /// other memory (`grad.data = ...`, or a module's double(), to() or share_memory()). Then it is
  /// somebody else's, and the place stays.
  void keep_place();

  /// Receives what autograd has accumulated, `gradient` into `grad`; returns whether `grad` is
  /// another tensor than before.
  bool take(const at::Tensor& gradient);

  /// Makes `grad` the place, with its value; returns whether it was elsewhere.
  bool move_in();

  /// Makes `grad` the place, with nothing in it.
  void make_zero();

  /// Leaves a block to `grad`.
  void let_go();

  /// Whether the program, and no pass, has put something into the gradient in this step. What has
  /// been reduced in this step may be written to: it is clipped, say.
  bool written_by_hand() const;

  /// Multiplies what is equal on all ranks, before more is added to it.
  void discount(double scale);

  bool in_block() const { return direct != nullptr; }
  std::uint32_t current_version() const;

  at::Tensor variable;
  // The accumulator lives as long as somebody holds it: a weak reference is all a tensor has.
  decltype(torch::autograd::impl::grad_accumulator(variable)) accumulator;
  std::string name;
  at::ScalarType dtype{};  // the variable's, when it was wrapped
  std::size_t bucket = 0;
  Place place;
  at::Tensor view;                         // the place, as `grad`; none if there is no block
  at::Tensor sparse;                       // the gradient as we have left it, if it was sparse
  std::unique_ptr<DirectGradient> direct;  // if it fills a bucket alone
  // What `view` was when it was let go.
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> known;
  int passes = 0;             // since the step began
  bool held = false;          // it holds a contribution of this rank that is not reduced
  bool base_reduced = false;  // what is in `view` is the same on all ranks
  bool arrived = false;       // in the current pass
  // Of `view` when the step began; none once the gradient has been reduced in this step.
  std::optional<std::uint32_t> version;

 private:
  bool computed_in_block(const at::Tensor& gradient) const;
  void make_room();
  void require_unchanged() const;
};

}  // namespace torch_ring
