// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bindings/accelerator.h"
#include "gradients/accumulator_hooks.h"
#include "gradients/backward_pass.h"
#include "gradients/bitmap.h"
#include "gradients/finite_check.h"
#include "gradients/hooked_parameter.h"
#include "gradients/pass_agreement.h"
#include "gradients/report.h"
#include "memory/block_pool.h"

namespace pybind11 {
class module_;
}

namespace torch_ring {

/// The hooks of one optimizer's parameters, which move gradients into buckets. After autograd has
/// accumulated a parameter's gradient, its hook moves it into the parameter's part of a bucket and
/// makes `grad` a view of that memory. From then on autograd accumulates in place, and nothing is
/// copied until `grad` is replaced. A hook costs tens of nanoseconds besides the copy, and runs no
/// Python. A `grad` that the program has given stays, and is copied to the bucket and back.
///
/// On a device the gradients of a bucket are copied together, when it is full or moved; those that
/// are not due yet are copied at the end of the pass. The copy runs on the current stream, which
/// follows all streams on which gradients of the bucket have arrived.
///
/// A sparse gradient stays in place and fills no bucket: the ranks must first agree whether it is
/// reduced as a sparse one (`local_gradient`, `set_sparse_result`) or as a dense one
/// (`move_into_buckets`).
///
/// Tensors that the program keeps do not change: before a new gradient would overwrite one, the
/// bucket gets other memory (`spare_kept`).
///
/// A parameter of several optimizers has one slot, in the hooks of the one that wrapped it last
/// (set_elsewhere()): its gradient is copied, counted and reduced there, and all step with that.
///
/// The hooks (hook_parameter()) outlive the object and do nothing once it is gone. Parameters are
/// hooked even if they do not require grad, so that they can be unfrozen.
///
/// Thread: any (autograd runs hooks in a thread per device). The mutex is never held while a
/// callback runs. Callers do not hold the GIL, because dropping a gradient may take it.
/// Blocking: no. Errors: backward() raises those of the hooks.
class GradientHooks final : public AccumulationListener,
                            public std::enable_shared_from_this<GradientHooks> {
 public:
  /// The position of a parameter's gradient: its bucket, and its first element there.
  struct Slot {
    std::size_t bucket;
    std::int64_t offset;
  };

  /// The slot of a parameter in the hooks of another optimizer.
  struct Elsewhere {
    std::shared_ptr<GradientHooks> hooks;
    std::size_t index;  // the parameter's there
  };

  /// The gradients that this rank has accumulated and not yet reduced.
  struct Pending {
    Bitmap due;         // to be reduced now
    Bitmap sparse;      // those of `due` that are sparse
    Bitmap carried;     // those, due or not, that have an averaged part, which is not sent
    Bitmap unsure;      // those of `carried` whose averaged part may not be that of other ranks
    bool accumulating;  // whether there are others, not due yet
    bool complete;      // whether each parameter is due, or was reduced since the step began
    bool late;          // some gradients have another part, to reduce after these: take_up_late()
    bool unready;       // refuse_others_pass() or set_buckets() must come first

    bool any() const { return due.any() || accumulating || late; }
  };

  struct Options {
    std::function<void()> on_backward_end;                   // at the end of a pass with a gradient
    std::function<void(std::size_t bucket)> on_bucket_full;  // during the pass
    // In a planned pass: launches a full bucket; makes the current stream wait for a launched one.
    std::function<void(const GradientHooks&, std::size_t bucket)> launch;
    std::function<void(const GradientHooks&, std::size_t bucket)> await_launched;
    std::function<at::Tensor(std::size_t bucket)> new_memory;  // other memory for a bucket
    std::function<void(const std::string& why)> fail;          // ends the job: it throws
    std::shared_ptr<BlockPool> blocks;                         // null if every bucket has memory
    std::shared_ptr<PassAgreement> agreement;                  // of the process set
    bool sums = false;                                         // op=Sum
    // Gradients are checked before they are sent; a magnitude above this counts like
    // an infinity. None: no checks.
    std::optional<double> largest;
  };

  ~GradientHooks() override;  // needs autograd's nodes, which this header only declares

  static std::shared_ptr<GradientHooks> make(std::vector<at::Tensor> parameters,
                                             std::vector<std::string> names, Options options);

  /// Gives every parameter its view of a bucket; gradients in older buckets move there. An empty
  /// tensor stands for a bucket with a single gradient in a block. `early`: by bucket, whether
  /// on_bucket_full is called for it.
  void set_buckets(const std::vector<at::Tensor>& buckets, const std::vector<Slot>& slots,
                   const std::vector<bool>& early);

  /// The gradients that count as due in pending().
  enum class Due {
    kNow,         // those after `passes_per_step` passes, outside of no_sync()
    kBegun,       // all outside of no_sync(), due or not: a planned pass takes them
    kEverything,  // all, including those that the program has set or written itself: each `grad`
                  // that has not been reduced since the step began
  };

  /// Brings the states up to date (closes a failed pass, forgets a gradient whose `grad` is None,
  /// finds those that the program has set), and returns the gradients that are due or accumulating.
  /// `stepping`: hooks of an optimizer that is about to step; everything in its slots here is due.
  /// May be null.
  Pending pending(Due which, const std::shared_ptr<GradientHooks>& stepping = nullptr);

  /// The number of parameters.
  std::size_t parameters() const { return parameters_.size(); }

  /// The report of these gradients, except for digests of weights. `optimizer`: its index.
  /// `is_stepping`: it is about to step. `orders`: whether it tells the order of readiness. `rank`:
  /// this one. Waits for a device that computes gradients that are checked.
  GradientReport report(const Pending& pending, std::size_t optimizer, bool is_stepping,
                        bool orders, int rank);

  /// The parameters whose gradient is not reduced although a step would use it, because the program
  /// has set or written it. Writes that torch does not count (through `.data`, say) are missed.
  std::vector<std::size_t> set_by_hand();

  /// Fails the job if another thread's backward pass is producing gradients now, or if a pass has
  /// failed after gradients had been sent.
  void refuse_others_pass();

  /// Whether a parameter is on another device than its bucket: then call set_buckets() before any
  /// reduction.
  bool parameters_moved();

  /// Ends the job if the program has changed one of these gradients so that its sum is unknown.
  void require_unchanged(const Bitmap& touched);

  /// Takes the averaged parts of these gradients out: only the open ones are sent, and
  /// mark_reduced() adds the averaged ones again.
  void carry(const Bitmap& carried);

  /// Drops the averaged parts of these gradients, to which no rank has added: they count as zero.
  void drop_averaged(const Bitmap& dropped);

  /// A gradient's averaged part after carry(), which the ranks average once more in place: in one
  /// dimension; zeros if there is none.
  at::Tensor carried_part(std::size_t index);

  /// The same of a sparse gradient; undefined if there is none. set_sparse_carried() replaces it.
  at::Tensor sparse_carried(std::size_t index);
  void set_sparse_carried(std::size_t index, at::Tensor part);

  /// Prepares the gradients of `touched`, the parameters that have one on some rank: a gradient
  /// outside its bucket moves there, a missing one becomes zero. `scale` multiplies an averaged
  /// gradient that is sent again, because the program may have written to it.
  void move_into_buckets(const Bitmap& touched, double scale);

  /// The memory of a bucket to reduce. All its gradients have arrived or been moved into it.
  at::Tensor memory(std::size_t bucket);

  /// A new tensor over a parameter's part of a bucket, with the gradient's shape, strides and
  /// (complex) dtype. Not for a gradient that lies in a block.
  at::Tensor bucket_view(std::size_t index);

  /// A parameter's gradient, to be reduced outside the buckets; undefined if it has none. `scale`:
  /// see move_into_buckets().
  at::Tensor local_gradient(std::size_t index, double scale);

  /// Makes a sparse tensor the reduced gradient of a parameter.
  void set_sparse_result(std::size_t index, const at::Tensor& gradient);

  /// Records that the buckets hold the reduced gradients of `touched`.
  void mark_reduced(const Bitmap& touched);

  // Planned passes (run_ahead.h).

  /// The next passes, until the next call, are planned: a bucket is launched when all its gradients
  /// of `planned` have arrived. Without a bitmap the ranks agree on the next passes.
  void expect(std::optional<Bitmap> planned);

  /// As move_into_buckets(), at the end of a planned pass. Saves the gradients that are not `due`.
  /// Returns those with an averaged part, after carry().
  Bitmap fill(const Bitmap& planned, const Bitmap& due, double scale);

  /// Restores the gradients of `nowhere`, which no rank had, to their state before fill(). Forgets
  /// the others.
  void restore(const Bitmap& nowhere);

  /// Adds the gradients that have arrived after their bucket was sent to `grad`, where they are
  /// due. Call it before the ranks agree once more on the pass.
  void take_up_late();

  /// Gives these parameters' slots, with their gradients, to hooks that were made later. Those keep
  /// them when their own optimizer is gone. Errors: c10::ValueError during a backward pass.
  void set_elsewhere(std::map<std::size_t, Elsewhere> slots);

  /// The optimizer is gone: from now on only slots of other optimizers' parameters count.
  /// Thread: any, with any lock.
  void leave() { is_left_ = true; }

  /// The parameters whose gradients one graph of torch.compile computes together in the current
  /// backward pass: the most of any graph. Empty outside of a pass.
  std::vector<std::size_t> compiled_together();

  /// Begins the next step, in which no gradient is reduced yet. With `gradients`, also forgets
  /// accumulated gradients, which are zero or gone.
  void reset(bool gradients);

  /// The averaged parts of gradients may not be those of other ranks: a rank had joined.
  void doubt_averages();

  /// Whether the last pass has failed and left gradients that are not reduced, since zero_grad() or
  /// a step.
  bool has_failed();

  /// Counts passes from zero again.
  void restart_passes();

  void set_passes_per_step(int passes);
  void set_synchronizing(bool synchronizing);

  /// Stops the hooks: in a forked child, because the buckets are its parent's; and if the optimizer
  /// has new hooks, or is gone. Not during a backward pass of its parameters.
  void disable();

  // For the hooks of the accumulators.
  void before_accumulation(std::size_t index) override;
  void after_accumulation(std::size_t index, const at::Tensor& gradient) override;
  bool follow(std::size_t index, const Accumulator& accumulator) override;

 private:
  class EndCallback;  // the callback at the end of a backward pass

  /// A bucket; the last three members are those of the present pass.
  struct Bucket {
    at::Tensor memory;                      // empty: that of its only gradient, in a block
    std::vector<std::size_t> members = {};  // its parameters
    bool is_early = false;    // it may be sent during the pass: between hosts, or on a GPU
    std::size_t missing = 0;  // gradients until it is full; a sparse one never fills it
    bool is_sent = false;
    Producers producers = {};  // on a device: the streams of its gradients
  };

  /// The earlier state of a gradient.
  struct Before {
    at::Tensor grad;   // undefined: there was none
    at::Tensor value;  // a copy of it
    bool in_bucket;    // whether it was a view of the bucket
    bool unreduced;
    AveragedPart averaged;
    std::uint64_t reduced_at;
    std::optional<std::uint32_t> writes;  // to the gradient, since the step began
  };

  /// The next passes, if they are planned.
  struct Plan {
    std::optional<Bitmap> gradients;       // that they reduce; none: the ranks agree
    std::map<std::size_t, Before> filled;  // by parameter: for restore()
  };

  /// The passes of the present step.
  struct Step {
    std::uint64_t began = 0;       // the number of reductions before
    int passes = 1;                // after which a gradient is due
    bool is_synchronizing = true;  // outside of no_sync()
  };

  GradientHooks(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                Options options);
  void close_pass(std::uint64_t number, bool failed);
  void go_on(std::uint64_t number);
  void queue_end(std::uint64_t number);
  std::uint64_t step_began();
  Bitmap slots_in(const GradientHooks& other);
  bool is_ready(std::size_t index, std::uint64_t since, bool stepping);
  bool is_by_hand(std::size_t index, std::uint64_t since);
  void reset_slot(std::size_t index, bool gradients);

  // Under mutex_:
  void close_failed();
  void close(bool failed);
  void count_missing();
  Before before(const HookedParameter& parameter) const;
  void restore_one(HookedParameter& parameter, const Before& before);
  void enter_pass(std::unique_lock<std::mutex>& lock, c10::Device device);
  void expect_in_block(HookedParameter& parameter);
  bool count_arrival(std::size_t index, bool fresh);
  void spare_kept(std::unique_lock<std::mutex>& lock, std::size_t index, BatchedCopy& copies);
  void complete(std::unique_lock<std::mutex>& lock, std::size_t bucket);
  void bring_in_rest();
  void note_changes();
  std::string change_among(const Bitmap& touched) const;
  bool is_elsewhere(std::size_t i) const { return !elsewhere_.empty() && elsewhere_.contains(i); }
  bool is_ignored(std::size_t i) const { return disabled_ || (is_left_ && !is_lent_[i]); }
  void begin_step(HookedParameter& parameter, bool gradients);
  bool has_sent_in_vain() const {
    return pass_.is_sent_in_vain || options_.agreement->has_sent_in_vain();
  }
  std::string failure() const {
    return pass_.is_sent_in_vain ? PassAgreement::kSentInVain : options_.agreement->failure();
  }
  void save_sent(std::size_t index);
  void arrive_late(std::size_t index);
  bool may_get_late(const Bucket& bucket) const;
  bool due(const HookedParameter& parameter) const { return parameter.passes >= step_.passes; }

  const Options options_;
  std::atomic<bool> disabled_{false};  // set while no hook runs

  // Some gradients have both an averaged and an open part, and note_changes() has not been called
  // since the last pass. Guards no other data.
  std::atomic<bool> may_have_changes_{false};

  std::atomic<bool> is_left_{false};        // the optimizer is gone; guards no other data
  std::vector<std::atomic<bool>> is_lent_;  // by parameter: the slot is another optimizer's, too

  // By parameter: its `grad` before autograd accumulates into it or makes it. Relaxed: stored by
  // the accumulating thread itself.
  std::vector<std::atomic<const void*>> present_;

  std::mutex mutex_;  // guards the members below
  Pass pass_;
  std::vector<HookedParameter> parameters_;
  std::map<std::size_t, Elsewhere> elsewhere_;  // by parameter: its slot, if it is not here
  std::vector<Bucket> buckets_;
  Plan plan_;
  FiniteCheck finite_;
  Step step_;
};

/// Adds the classes and functions of gradients to the native module.
void bind_gradients(pybind11::module_& module);

}  // namespace torch_ring
