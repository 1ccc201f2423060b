// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradients/accumulator_hooks.h"
#include "gradients/gradient_allocator.h"

namespace torch_ring {

/// One gradient's part of a bucket, and its layout there (DDP: gradient_as_bucket_view).
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

  /// Moves the view to `memory`, or to memory from torch if it is null.
  void move_to(std::shared_ptr<void> memory);

  /// A new tensor over the view, for `grad`. Autograd does not treat it as a view; saving or
  /// copying it takes only its own elements.
  at::Tensor tensor() const;
};

/// The memory of a tensor without holes, in one dimension; a complex number is two real ones.
at::Tensor flat(const at::Tensor& tensor);

/// Adds a gradient to another one; either may be sparse.
void add_to(at::Tensor& to, const at::Tensor& from);

/// Copies values between layouts, dtypes and devices; `from` may be sparse.
void copy_into(const at::Tensor& to, const at::Tensor& from);

/// Copies gradients into their views. Copies on the host are made at once; those on a device are
/// collected and made by run(), as one operator for each device and dtype. On CUDA that is a kernel
/// for every 64 gradients.
///
/// Thread: one at a time; the copies are enqueued on its current streams. Blocking: no.
class BatchedCopy {
 public:
  /// Copies a gradient into its view, from any layout, dtype or device. It is kept until run(), and
  /// its memory until the copy has been made, if it belongs to `stream`; none: the current stream.
  void copy(const at::Tensor& to, const at::Tensor& from,
            const std::optional<c10::Stream>& stream = std::nullopt);

  /// Makes a view zero.
  void zero(const at::Tensor& view);

  /// Enqueues the collected copies.
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

/// A tensor that was `grad` once, and may be gone since.
class FormerTensor {
 public:
  void set(const at::Tensor& tensor);
  void reset() { tensor_.reset(); }

  /// Whether `grad` is that tensor.
  bool is(const at::Tensor& grad) const;

  /// ... in the memory of that time: `grad.data = ...` gives it other memory.
  bool is_unmoved(const at::Tensor& grad) const {
    return is(grad) && grad.const_data_ptr() == data_;
  }

 private:
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensor_;
  const void* data_ = nullptr;
};

/// A gradient has two parts: the averaged one, of passes that are reduced already, and the open
/// one, which autograd has added since. This is the averaged one. It is taken out of `grad` before
/// autograd adds to that, so that only the open part is sent, and added again afterwards.
///
///           become_whole()          take_out()           put_back()
///     kNone ─────────────▶ kWhole ─────────────▶ kApart ───────────▶ kBoth
///                             ▲                   │   ▲                │
///                             └───────────────────┘   └────────────────┘
///                                become_whole()           take_out()
///
/// forget() leads from each state to kNone, replace() to kApart. carry() and rejoin() of a
/// HookedParameter call take_out() and put_back().
class AveragedPart {
 public:
  enum class State {
    kNone,   // `grad` is open, or there is none
    kWhole,  // `grad` is an average, perhaps of an earlier step
    kApart,  // `grad` is the open part, value() the averaged one
    kBoth,   // `grad` is the sum of both, value() the averaged one
  };

  bool is_none() const { return state_ == State::kNone; }
  bool is_whole() const { return state_ == State::kWhole; }
  bool is_apart() const { return state_ == State::kApart; }
  bool is_both() const { return state_ == State::kBoth; }

  /// The part alone; undefined if is_none() or is_whole().
  const at::Tensor& value() const { return value_; }

  /// Whether value() is not zero. Waits for a device.
  bool carries_value() const;

  void become_whole() {
    forget();
    state_ = State::kWhole;
  }
  void forget() {
    state_ = State::kNone;
    if (value_.defined()) value_.reset();
    is_unsure_ = is_changed_ = false;
  }

  /// Takes the part out of `grad`, in place; from kWhole or kBoth.
  void take_out(at::Tensor& grad);

  /// Adds the part to `grad` again; from kApart.
  void put_back(at::Tensor& grad);

  /// Makes another tensor the part; becomes kApart.
  void replace(at::Tensor value) {
    value_ = std::move(value);
    state_ = State::kApart;
  }

  /// Records the version of `grad` in kBoth, as the program gets it.
  void note_version(const at::Tensor& grad);

  /// In kBoth: forgets the part if the program has set or written `grad` since note_version(): all
  /// of it is open then. But a sum (`sums`) would count the part once for each rank, unless that
  /// or `grad` is zero: then is_changed(), and the gradient cannot be reduced. `is_known`: whether
  /// `grad` is the same tensor as then.
  void note_changes(const at::Tensor& grad, bool is_known, bool sums);

  bool is_changed() const { return is_changed_; }

  /// Whether the part may not be that of other ranks.
  bool is_unsure() const { return is_unsure_; }
  void doubt(bool is_unsure) { is_unsure_ = is_unsure; }

 private:
  State state_ = State::kNone;
  at::Tensor value_;
  bool is_unsure_ = false;
  bool is_changed_ = false;
  std::uint32_t noted_ = 0;  // by note_version()
};

/// One parameter of a GradientHooks, and the memory of its gradient. The gradient lies in a part of
/// a bucket or, if it fills a bucket alone, in a block of shared memory. If autograd has computed
/// it in the block, nothing is copied, and `bucket_view` is the tensor that autograd has made.
/// Between two steps the block belongs to `grad`, and is freed with it.
///
/// A gradient on a device stays in autograd's memory (`outside`) until bring_in() or copy_in()
/// copies it together with others of its bucket.
///
/// `grad` stays the program's if the program has given it (`p.grad = flat[a:b]`), as with DDP's
/// gradient_as_bucket_view=False: its value is copied into the view, and the result back.
///
/// Every use begins with refresh().
/// Thread: one at a time.
struct HookedParameter {
  HookedParameter(at::Tensor variable, std::string name);

  /// Drops `bucket_view` if it no longer lies in the view: the program may have given it other
  /// memory (`grad.data = ...`, or a module's double(), to() or share_memory()). Restores it if
  /// `grad` still is the tensor that release_to_grad() left.
  void refresh();

  /// Handles a gradient that autograd has accumulated, `gradient` into `grad`; returns whether
  /// `grad` is another tensor than before. `is_new`: autograd has made `grad` just now.
  bool on_gradient(const at::Tensor& gradient, bool is_new);

  /// Moves the gradient to another view, outside of blocks. Tensors over the earlier one stay
  /// valid.
  void lie_in(GradientView other);

  /// Whether copy_in() or make_zero() would overwrite a gradient that the program has kept.
  bool would_overwrite_kept() const;

  /// Adopts a new accumulator, which torch has made because the parameter was converted. The
  /// gradient may have been converted with it.
  void follow(const Accumulator& other);

  /// Whether the parameter is on another device than the memory of its gradient.
  bool has_moved() const { return variable.device() != device; }

  /// Copies `grad` into the view, and makes `grad` a tensor over it unless it is the program's;
  /// returns whether `grad` was unknown to the hook.
  bool copy_in(BatchedCopy& copies);

  /// Copies the gradient that on_gradient() has left outside, if any, even if `grad` was replaced
  /// since.
  void bring_in(BatchedCopy& copies);

  /// Whether the gradient that has arrived in this pass will be reduced even if `grad` was replaced
  /// since.
  bool is_in_pass() const {
    return arrived && (bucket_view.defined() || outside.defined()) && !sparse.defined();
  }

  /// The gradient that will be reduced; undefined if there is none.
  const at::Tensor& to_send() const {
    if (!is_in_pass()) return variable.grad();
    return outside.defined() ? outside : bucket_view;
  }

  /// Makes `grad` a tensor of zeros over the view.
  void make_zero(BatchedCopy& copies);

  /// Whether `grad` is the program's, and known as such.
  bool is_given() const { return given.is_unmoved(variable.grad()); }

  /// Takes the averaged part, if any, out of `grad`, before autograd adds to it or it is sent.
  void carry();

  /// Adds a part that is apart to `grad` again.
  void rejoin();

  /// Whether there is an averaged part: `grad` itself, or a carried one.
  bool has_average() const {
    return averaged.value().defined() || (averaged.is_whole() && !unreduced && is_known());
  }

  /// See AveragedPart. All views of one memory share a version, so call note_changes() before a
  /// gradient of any parameter changes.
  void note_version() { averaged.note_version(variable.grad()); }
  void note_changes(bool sums);

  /// Copies the reduced gradient into the program's `grad`.
  void write_back(BatchedCopy& copies);

  /// Drops this object's references to a block, so that `grad` alone owns it.
  void release_to_grad();

  /// Records that `grad` holds the reduced gradient. `now`: the number of reductions so far.
  void be_reduced(std::uint64_t now);

  /// Takes the gradient of the same parameter over, and what is known of it. `other`: the slot of
  /// another optimizer, which is empty afterwards. `most`: the passes of a step here.
  void take_over(HookedParameter& other, int most);

  /// Whether `grad` is a tensor of this object, and not the program's own.
  bool has_known() const;

  /// Whether the program, and no backward pass, has written to the gradient in this step. Writes to
  /// a gradient that was reduced in this step do not count (clipping, say), nor do zeros.
  bool written_by_hand() const;

  /// Whether the program may have set or written the gradient: a write through `.data` or NumPy
  /// leaves no trace. `was_reduced`: since the step began.
  bool may_be_by_hand(bool was_reduced) const;

  /// Whether the program has set or written a gradient that no pass has reduced since a step began.
  bool is_by_hand(std::uint64_t since);

  /// Multiplies an averaged gradient by `scale`, before it is sent as a gradient of this rank.
  void rescale_averaged(double scale);

  bool in_block() const { return direct != nullptr; }
  bool on_device() const { return !device.is_cpu(); }
  std::uint32_t current_version() const;  // of the gradient

  at::Tensor variable;
  // Keeps the accumulator alive: a tensor has only a weak reference to it.
  Accumulator accumulator;
  std::string name;
  at::ScalarType dtype{};  // of the variable when it was wrapped
  std::size_t bucket = 0;
  c10::Device device = c10::kCPU;  // the bucket's
  GradientView view;               // the place of the gradient
  at::Tensor bucket_view;          // a tensor over `view`, for `grad`; undefined without a block
  at::Tensor sparse;               // the last gradient, if sparse
  at::Tensor outside;              // the last gradient, if it waits for its bucket
  std::optional<c10::Stream> outside_stream;  // the stream that owns its memory
  std::unique_ptr<DirectGradient> direct;     // if it fills a bucket alone
  // `grad`, saved while autograd makes another one, because its bucket has been sent in this pass.
  at::Tensor saved;
  FormerTensor given;            // the program's `grad`
  FormerTensor known;            // `bucket_view` when release_to_grad() left the block to `grad`
  int passes = 0;                // since the step began
  std::uint64_t reduced_at = 0;  // the number of the gradient's last reduction; 0: none
  bool unreduced = false;        // there is a gradient of this rank, sent or not, not reduced yet
  AveragedPart averaged;
  bool is_zero = false;    // the step began with a gradient of zeros, if any
  bool arrived = false;    // in the current pass, and not reduced yet
  bool made = false;       // `grad` was made by autograd, in the current pass
  bool converted = false;  // `grad` has the value of `bucket_view`, in other memory
  // The gradient's version when the step began; none once it has been reduced.
  std::optional<std::uint32_t> version;

 private:
  void forget();
  bool has_zeros() const;
  bool is_known() const;
  bool computed_in_block(const at::Tensor& gradient) const;
  bool leave_outside();
  void note_given();
  void require_reducible() const;
  void ensure_memory();
  void require_unchanged() const;
};

}  // namespace torch_ring
