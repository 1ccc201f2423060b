// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "bindings/accelerator.h"
#include "engine/engine.h"
#include "gradients/gradient_hooks.h"

namespace torch_ring {

/// A launched allreduce. Thread: any. Blocking: no.
class Launched {
 public:
  Launched(std::shared_ptr<Engine> engine, at::Tensor tensor, OutputEvent written)
      : engine_(std::move(engine)), tensor_(std::move(tensor)), written_(std::move(written)) {}

  /// Whether the tensor holds the result.
  bool done() const { return written_.query(); }

  /// Makes the current stream wait for the result, and returns the tensor. `waited`: another launch
  /// for which that stream waits already; may be null. Errors: the engine's fatal cause.
  const at::Tensor& wait(const Launched* waited = nullptr) const {
    engine_->check();
    written_.wait(tensor_, waited ? &waited->written_ : nullptr);
    return tensor_;
  }

 private:
  std::shared_ptr<Engine> engine_;
  at::Tensor tensor_;
  OutputEvent written_;
};

/// Launches an allreduce of a tensor in place on a device, without an agreement, after the work on
/// the current stream. All ranks of the engine's process set launch the same ones in the same
/// order.
/// Thread: any, without the GIL. Blocking: as Engine::launch(). Errors: Error(kInvalidArgument) for
/// a tensor that is not on a device; those of allreduce_request(); the engine's.
Launched launch_allreduce(std::shared_ptr<Engine> engine, int size, const at::Tensor& tensor,
                          int op, double prescale, double postscale,
                          const Engine::Interrupt& interrupt);

/// The same of contiguous tensors of a device, after `ready`: an allreduce of `output` in place, or
/// an allgather of one `input` a rank to `output`. `promised`: see Engine::launch().
Launched launch_plain(const std::weak_ptr<Engine>& engine, const Fingerprint& what,
                      const at::Tensor& input, const at::Tensor& output,
                      std::shared_ptr<c10::Event> ready, bool promised = false);

/// The engine. Throws Error(kInternal) if it was shut down.
std::shared_ptr<Engine> running(const std::weak_ptr<Engine>& engine);

/// One bucket of a plan. Equal on all ranks, except for the tensors.
struct PlannedBucket {
  std::weak_ptr<GradientHooks> optimizer;  // which may be gone
  std::size_t bucket;
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;  // (begin, end), in elements
  at::Tensor memory;  // with the size, dtype and device that are sent
  bool cast;          // `memory` itself is sent, with the bucket's values in its dtype
  int op;
  double prescale;
  double postscale;
};

/// Launches the buckets of planned backward passes, without an agreement. A plan lists the
/// gradients that the ranks reduce in each of them. In a planned pass every rank launches the same
/// reductions in the same order: a bucket as soon as its gradients and all earlier buckets are
/// there, the rest when the pass ends, with zeros for missing gradients.
/// torch_ring/optimizer/planned_pass.py decides which passes are planned.
///
/// The order of locks: this object's, the lock of the optimizer's hooks, the engine's.
///
/// Thread: any, without the GIL. Blocking: no, but as Engine::launch(). Errors: the engine's, from
/// launch_rest().
class RunAhead {
 public:
  explicit RunAhead(std::weak_ptr<Engine> engine) : engine_(std::move(engine)) {}

  /// Sets the plan; without buckets the next passes are not planned.
  void set_plan(std::vector<PlannedBucket> buckets);

  /// Begins a pass: from now on bucket_full() launches. Drops the pass before.
  void open();

  /// Call it when all planned gradients of a bucket have arrived, on the last one's stream.
  void bucket_full(const GradientHooks& optimizer, std::size_t bucket);

  /// Makes the current stream wait for a bucket, if it has been launched in this pass.
  void wait_for(const GradientHooks& optimizer, std::size_t bucket);

  /// Whether a bucket has been launched in this pass.
  bool has_launched();

  /// Launches the rest of the pass. Throws if this, or an earlier launch, fails.
  void launch_rest();

  /// Makes the current stream wait for the pass, and writes the results into the buckets.
  void wait();

  /// Launches zeros for a pass, on a rank that has joined.
  void stand_in();

 private:
  /// A planned bucket in the current pass, and the allreduces of its runs.
  struct State {
    PlannedBucket planned;
    std::vector<Fingerprint> runs;
    at::Tensor memory;                  // from prepare() on: what is sent,
    std::shared_ptr<c10::Event> ready;  // ... recorded when it is there
    std::vector<Launched> launched;
  };

  // Under mutex_:
  State* find(const GradientHooks& optimizer, std::size_t bucket);
  void close();
  void prepare(State& state) const;
  void launch(State& state) const;

  const std::weak_ptr<Engine> engine_;
  std::mutex mutex_;          // guards the members below
  std::vector<State> plan_;   // in the order of launches
  bool is_open_ = false;      // a pass is under way
  std::size_t next_ = 0;      // the first one that is not launched in it
  std::exception_ptr error_;  // of a launch during the pass: the end of the pass throws it
};

/// The Request::allocate of a join, which hears of the passes that the other ranks enter, and
/// launches zeros for planned ones.
std::function<void*(std::span<const std::int64_t>)> standing_in(
    std::shared_ptr<RunAhead> run_ahead);

}  // namespace torch_ring
