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
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bindings/accelerator.h"
#include "core/finite.h"
#include "gradients/hooked_parameter.h"
#include "gradients/pass_agreement.h"
#include "memory/block_pool.h"

namespace pybind11 {
class module_;
}

namespace torch_ring {

/// Tells the backward passes of a process apart. A backward pass as one of its threads sees it.
struct BackwardPass {
  int task;  // autograd's number; -1 outside of backward passes. The outermost one that is known
  std::thread::id thread;
  bool on_device;           // seen by a thread of a device, which autograd has for all passes
  bool has_nested = false;  // it has brought gradients of a nested one, and may bring them again

  static BackwardPass current();

  /// Whether `other` runs at the same time as this pass, which has not ended. One thread runs
  /// several passes if they are nested, as in reentrant checkpoints: they are one pass, and `task`
  /// is the outer one as soon as the first inner one has ended. Of passes on devices it says no: a
  /// nested one may be in the thread of another device.
  bool is_beside(const BackwardPass& other) const {
    if (task == other.task || on_device || other.on_device) return false;
    return thread != other.thread || (other.task >= 0 && other.task < task);
  }
};

/// Whether bit i % 8 of byte i / 8 is set.
inline bool get(const std::string& bitmap, std::size_t i) {
  return (static_cast<unsigned char>(bitmap.at(i / 8)) >> (i % 8)) & 1;
}

/// Moves gradients into buckets as autograd produces them. The hooks of one optimizer's
/// parameters. After autograd has accumulated a parameter's gradient, its hook moves it into
/// the parameter's part of a bucket and makes `grad` a view of that memory. From then on
/// autograd accumulates in place, and nothing is copied until `grad` is replaced. A hook costs
/// tens of nanoseconds besides the copy, and no Python. A `grad` that the program has given
/// stays, and is copied to the bucket and back.
///
/// On a device the gradients of a bucket are copied together, when it is full or moved, and those
/// that are not due yet at the end of the pass. The copy runs on the stream that is current then,
/// which follows all streams on which gradients of the bucket have arrived.
///
/// A sparse gradient stays where it is and fills no bucket: the ranks have to agree first whether
/// it is reduced as a sparse one (`local_gradient`, `set_sparse_result`) or as a dense one
/// (`move_into_buckets`).
///
/// A tensor that the program keeps keeps its value. Where a new gradient would overwrite one, the
/// bucket gets other memory first (`spare_kept`).
///
/// The hooks (hook_parameter()) outlive the object and do nothing once it is gone. A parameter
/// is hooked whether it requires grad now or not, so that it can be frozen and unfrozen.
///
/// In a bitmap, parameter i is bit i % 8 of byte i / 8.
///
/// Thread: any (autograd runs hooks in a thread per device). The mutex is never held while a
/// callback runs. Callers do not hold the GIL, because dropping a gradient may take it.
/// Blocking: no. Errors: a hook's come out of backward().
class GradientHooks final : public std::enable_shared_from_this<GradientHooks> {
 public:
  using Bitmap = std::string;

  /// The position of a parameter's gradient: its bucket, and its first element there.
  struct Slot {
    std::size_t bucket;
    std::int64_t offset;
  };

  /// The gradients that are accumulated on this rank and not yet reduced.
  struct Pending {
    Bitmap due;         // to be reduced now
    Bitmap sparse;      // those of `due` that are sparse
    bool accumulating;  // whether there are others, not due yet
    bool complete;      // whether each parameter is due, or was reduced since the step began
    bool again;         // of some, another part is to be reduced when these are: take_up_aside()
    bool unready;       // refuse_others_pass() or the new buckets of parameters_moved() come first
  };

  struct Options {
    /// 1/size for op=Sum, else 1. It multiplies an already reduced gradient before autograd
    /// accumulates into it, so that the next Sum counts it once.
    double reduced_scale = 1.0;
    std::function<void()> on_backward_end;                   // at the end of a pass with a gradient
    std::function<void(std::size_t bucket)> on_bucket_full;  // during the pass
    // In a planned pass: a bucket is full; the current stream is to wait for it, if it is launched.
    std::function<void(const GradientHooks&, std::size_t bucket)> launch;
    std::function<void(const GradientHooks&, std::size_t bucket)> await_launched;
    std::function<at::Tensor(std::size_t bucket)> new_memory;  // other memory for a bucket
    std::function<void(const std::string& why)> fail;          // ends the job: it throws
    std::shared_ptr<BlockPool> blocks;                         // null if every bucket has memory
    std::shared_ptr<PassAgreement> agreement;                  // of the process set
    // Gradients are looked at before they are sent (not_finite()), and a magnitude above this is as
    // bad as an infinity. None: they are not.
    std::optional<double> largest;
  };

  /// A gradient with a number that is not finite, or too large.
  struct NotFinite {
    std::size_t index;
    Worst worst;   // of its numbers
    bool on_base;  // it contains an already reduced gradient
  };

  ~GradientHooks();  // the headers do not know autograd's nodes, which end with it

  static std::shared_ptr<GradientHooks> make(std::vector<at::Tensor> parameters,
                                             std::vector<std::string> names, Options options);

  /// Gives every parameter its view of a bucket; gradients in older buckets move there. An empty
  /// tensor stands for a bucket of one gradient that lies in a block. `early`: by bucket, whether
  /// on_bucket_full is called for it.
  void set_buckets(const std::vector<at::Tensor>& buckets, const std::vector<Slot>& slots,
                   std::vector<bool> early);

  /// The gradients that pending() calls due.
  enum class Due {
    kNow,         // those after `passes_per_step` passes, outside of no_sync()
    kStarted,     // all outside of no_sync()
    kEverything,  // all; also those that the program has set or written itself: each `grad` that
                  // nothing has reduced since the step began
  };

  /// The gradients that are due or accumulating.
  Pending pending(Due which);

  /// The parameters whose gradient a step would take though it is not reduced: the program has set
  /// or written it. A write that torch does not count (through `.data`, say) is not seen.
  std::vector<std::size_t> set_by_hand();

  /// Whether not_finite() finds any.
  bool looks_at_gradients() const { return options_.largest.has_value(); }

  /// The gradients of `due` that are not finite, as they are before they are reduced. One whose
  /// bucket has been sent in this pass was looked at before that. Waits for a device's.
  std::vector<NotFinite> not_finite(const Bitmap& due);

  /// The worst number of each gradient. Waits for devices.
  static std::vector<Worst> worst_numbers(std::vector<at::Tensor> gradients);

  /// Fails the job if another thread's backward pass is producing gradients now, or if a pass has
  /// failed after a part of it was sent.
  void refuse_others_pass();

  /// Whether a parameter is on another device than its bucket: set_buckets() comes before anything
  /// is reduced.
  bool parameters_moved();

  /// Prepares the gradients of `touched`, the parameters that have one on some rank: a gradient
  /// outside its bucket moves there, a missing one becomes zero.
  void move_into_buckets(const Bitmap& touched);

  /// The memory of a bucket to reduce. All its gradients have arrived or been moved into it.
  at::Tensor memory(std::size_t bucket);

  /// A new tensor over a parameter's part of a bucket, with the gradient's shape, strides and
  /// (complex) dtype. Not for a gradient that lies in a block.
  at::Tensor bucket_view(std::size_t index);

  /// A parameter's gradient, to be reduced outside the buckets; undefined if it has none.
  at::Tensor local_gradient(std::size_t index);

  /// Makes a sparse tensor the reduced gradient of a parameter.
  void set_sparse_result(std::size_t index, const at::Tensor& gradient);

  /// Records that the buckets hold the reduced gradients of `touched`.
  void mark_reduced(const Bitmap& touched);

  // Planned passes (run_ahead.h).

  /// The next passes are planned ones, until it is called again: a bucket is launched when all
  /// its gradients of `planned` are there. Without a bitmap: the ranks agree on the next passes.
  void expect(std::optional<Bitmap> planned);

  /// As move_into_buckets(), at the end of a planned pass. Remembers the gradients that are not
  /// `due` as they were.
  void fill(const Bitmap& planned, const Bitmap& due);

  /// Gives the gradients of `nowhere` back as they were before fill(): no rank had them. Forgets
  /// the others.
  void restore(const Bitmap& nowhere);

  /// Takes this rank's gradients of `extra` aside, which are not planned: `grad` is as it was
  /// before they came.
  void put_aside(const Bitmap& extra);

  /// Adds what was put aside to `grad`, where it is due. Call before the ranks agree on a pass;
  /// with `again` before they agree once more, as gradients have come again after they had been
  /// sent.
  void take_up_aside(bool again);

  /// Takes note that `other` has hooks on some of the same parameters, and tells it so. Both put a
  /// gradient into buckets of their own, and `grad` is in one of them: so none of these is sent
  /// before the end of the pass, when both have it.
  void share(const std::shared_ptr<GradientHooks>& other);

  /// Parameters in the order in which their gradients became ready in the current pass.
  std::vector<std::size_t> ready_order();

  /// Begins the next step: nothing of it is reduced yet. With `gradients`, also forgets accumulated
  /// gradients: they are zero or gone.
  void reset(bool gradients);

  /// Counts passes from zero again.
  void restart_passes();

  /// Makes an already reduced gradient count once although ranks have joined: `scale` multiplies it
  /// in addition to Options::reduced_scale.
  void set_base_scale(double scale) { base_scale_ = scale; }

  /// Whether a gradient that is not reduced yet contains an already reduced one.
  bool has_base();

  /// The same, by parameter: 0 no, 1 yes, 2 yes, and the program may have changed that since.
  std::vector<std::uint8_t> bases();

  /// A gradient that was averaged before agreement `number`, the next one here, and is unchanged;
  /// and a 1 behind its elements. Null if it is not here, or has another size. Until the next call.
  const void* kept(std::int64_t number, std::size_t index, std::size_t bytes);

  /// Scales a reduced gradient to which nothing was added in this pass as one to which something
  /// was: by the scale that held then.
  void keep_scale(std::size_t index);

  /// Adds a flat tensor to a gradient; one that is reduced stays so.
  void add(std::size_t index, const at::Tensor& value);

  void set_passes_per_step(int passes);
  void set_synchronizing(bool synchronizing);

  /// Stops the hooks: in a forked child, as the buckets are its parent's; and of an optimizer that
  /// has others now, or is gone. Not during a backward pass of its parameters.
  void disable();

  // For the hooks, in a thread of autograd.
  void before_accumulation(std::size_t index);
  void after_accumulation(std::size_t index, const at::Tensor& gradient);

  /// A parameter has another accumulator. Returns whether that is hooked now.
  bool follow(std::size_t index, const Accumulator& accumulator);

 private:
  class PassEnd;  // the callback at the end of a backward pass

  /// A gradient before something was done to it.
  struct Before {
    at::Tensor grad;   // undefined: there was none
    at::Tensor value;  // a copy of it
    bool in_bucket;    // whether it was a tensor over the bucket
    bool unreduced;
    bool base_reduced;
    bool reduced;
    std::optional<std::uint32_t> writes;  // to the gradient, since the step began
  };

  /// Other hooks of a parameter.
  struct Sharer {
    std::weak_ptr<GradientHooks> hooks;
    std::size_t index;  // the parameter's there
  };

  /// The worst numbers of some gradients.
  struct Looks {
    /// Gradients on a device, of one dtype: theirs are not known yet.
    struct OnDevice {
      std::vector<std::size_t> parameters;
      std::vector<at::Tensor> gradients;
      std::vector<at::Tensor> largest;  // magnitudes; of the first ones
    };

    bool has(std::size_t i) const { return i < worst.size() && worst[i]; }

    std::vector<std::optional<Worst>> worst;  // by parameter
    std::map<at::ScalarType, OnDevice> on_device;
  };

  GradientHooks(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                Options options);
  void close_pass(std::uint64_t number, bool failed);
  void go_on(std::uint64_t number);
  void queue_end(std::uint64_t number);
  void tell_sharers(const Bitmap& reduced);
  void reduced_elsewhere(std::size_t index);

  // Under mutex_:
  void close_failed();
  void close(bool failed);
  void count_missing();
  Before before(const HookedParameter& parameter) const;
  void give_back(HookedParameter& parameter, const Before& before);
  void keep_base(std::size_t index);
  void enter_pass(std::unique_lock<std::mutex>& lock, c10::Device device);
  void expect_in_block(HookedParameter& parameter);
  bool count_arrival(std::size_t index, bool fresh, const at::Tensor& gradient);
  void spare_kept(std::unique_lock<std::mutex>& lock, std::size_t index, BatchedCopy& copies);
  void complete(std::unique_lock<std::mutex>& lock, std::size_t bucket);
  void settle();
  void look(const std::vector<std::size_t>& parameters, Looks& looks) const;
  bool is_shared(std::size_t bucket) const;
  double scale() const { return options_.reduced_scale * base_scale_; }
  void keep_sent(std::size_t index);
  void put_aside_again(std::size_t index);
  bool is_held(std::size_t bucket) const;
  void rescale_reduced(HookedParameter& parameter) { parameter.rescale_reduced(scale()); }
  bool due(const HookedParameter& parameter) const { return parameter.passes >= passes_per_step_; }

  const Options options_;
  std::atomic<bool> disabled_{false};  // set while no hook runs

  std::atomic<double> base_scale_{1.0};  // set between passes

  std::atomic<bool> has_plan_{false};  // whether planned_ has a value; guards no other data

  // By parameter: its `grad` before autograd accumulates into it or makes it. Relaxed: the thread
  // that accumulates has stored it.
  std::vector<std::atomic<const void*>> present_;

  std::mutex mutex_;                  // guards the members below
  std::optional<BackwardPass> pass_;  // the pass that has brought gradients and not ended
  std::uint64_t passes_ = 0;          // that have begun: the number of the last one
  bool sent_ = false;                 // a bucket has been sent in this pass
  bool sent_in_vain_ = false;         // ... and the pass has failed
  std::vector<HookedParameter> parameters_;
  std::vector<at::Tensor> buckets_;
  std::vector<std::vector<std::size_t>> members_;  // by bucket: its parameters
  std::vector<bool> early_;                        // by bucket: whether on_bucket_full is called
  std::vector<std::size_t> missing_;  // by bucket: gradients missing in this pass, or kSent
  std::vector<Producers> producers_;  // by bucket on a device: of this pass
  std::vector<std::size_t> arrived_;  // parameters, in order
  std::map<std::size_t, std::vector<Sharer>> sharers_;  // by parameter
  std::optional<Bitmap> planned_;            // in a planned pass: the gradients it reduces
  std::map<std::size_t, Before> filled_;     // by parameter: for restore()
  std::map<std::size_t, Before> bases_;      // by parameter: before an unplanned gradient
  std::map<std::size_t, at::Tensor> aside_;  // by parameter: what was put aside
  bool again_ = false;                       // ... as it came again, after its bucket was sent
  at::Tensor kept_;                          // what kept() has given
  Looks looked_at_;                          // gradients whose buckets have been sent in this pass
  std::set<std::size_t> repeated_;  // parameters that have got several gradients in one pass
  int passes_per_step_ = 1;
  bool synchronizing_ = true;
};

/// Adds the classes and functions of gradients to the native module.
void bind_gradients(pybind11::module_& module);

}  // namespace torch_ring
