#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/accelerator.h"
#include "engine/engine.h"

namespace torch_ring {

/// A launched allreduce. Thread: any. Blocking: no.
class Launched {
 public:
  Launched(std::shared_ptr<Engine> engine, at::Tensor tensor, OutputEvent written)
      : engine_(std::move(engine)), tensor_(std::move(tensor)), written_(std::move(written)) {}

  /// Whether the tensor holds the result.
  bool done() const { return written_.query(); }

  /// Makes the current stream wait for the result, and returns the tensor. Errors: the engine's
  /// fatal cause.
  const at::Tensor& wait() const {
    engine_->check();
    written_.wait(tensor_);
    return tensor_;
  }

 private:
  std::shared_ptr<Engine> engine_;
  at::Tensor tensor_;
  OutputEvent written_;
};

/// Allreduces on a device that the ranks start without an agreement. Launches the allreduces of
/// one process set. All ranks launch the same in the same order.
/// Thread: one at a time, without the GIL. Blocking: as Engine::launch().
/// Errors: Error(kInvalidArgument) for a tensor that is not on a device, and as
/// allreduce_request(); the engine's.
class Launcher {
 public:
  Launcher(std::weak_ptr<Engine> engine, int size) : engine_(std::move(engine)), size_(size) {}

  /// Reduces a tensor in place, after what is on the current stream.
  Launched allreduce(const at::Tensor& tensor, int op, double prescale, double postscale,
                     const Engine::Interrupt& interrupt = {}) const;

 private:
  const std::weak_ptr<Engine> engine_;
  const int size_;
};

/// The buckets of one optimizer.
class BucketMemory {
 public:
  /// The memory of a bucket to reduce. All its gradients have arrived or been moved into it.
  virtual at::Tensor memory(std::size_t bucket) = 0;

  /// A gradient that was averaged before agreement `number`, the next one here, and is unchanged;
  /// and a 1 behind its elements. Null if it is not here, or has another size. Until the next call.
  virtual const void* kept(std::int64_t number, std::size_t index, std::size_t bytes) = 0;

 protected:
  ~BucketMemory() = default;
};

/// One bucket of a plan. All ranks have equal ones, but for the tensors.
struct PlannedBucket {
  std::weak_ptr<BucketMemory> optimizer;  // which may be gone
  std::size_t bucket;
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;  // (begin, end), in elements
  at::Tensor memory;  // of the size, dtype and device that are sent
  bool cast;          // `memory` itself is sent, with the bucket's values in its dtype
  int op;
  double prescale;
  double postscale;
};

/// Launches the buckets of a planned backward pass, without the other ranks' hosts. A plan says
/// which gradients the ranks reduce in each backward pass, as a cycle of passes. In a planned
/// pass every rank launches the same reductions in the same order, and asks nobody: a bucket as
/// soon as its gradients and all earlier buckets are there, the rest when the pass ends, with
/// zeros in the place of missing gradients. torch_ring/optimizer/planned_pass.py decides which
/// passes are planned.
///
/// Locks are taken in this order: this object's, that of the optimizer's hooks, the engine's.
///
/// Thread: any, without the GIL. Blocking: no, but as Engine::launch(). Errors: the engine's, from
/// launch_rest().
class RunAhead {
 public:
  RunAhead(std::weak_ptr<Engine> engine, int size) : launcher_(std::move(engine), size) {}

  /// Takes a plan. Pass `first` is `passes[0]`, the next one `passes[1]`, and so on in a cycle.
  void set_plan(std::uint64_t first, std::vector<std::vector<PlannedBucket>> passes);

  /// Begins pass `number`: bucket_full() launches from now on. Drops the pass before.
  void open(std::uint64_t number);

  /// Drops the plan.
  void close();

  /// All planned gradients of a bucket have arrived. Call on the last one's stream.
  void bucket_full(const BucketMemory& optimizer, std::size_t bucket);

  /// Makes the current stream wait for a bucket, if it has been launched in this pass.
  void wait_for(const BucketMemory& optimizer, std::size_t bucket);

  /// Whether a bucket has been launched in this pass.
  bool has_launched();

  /// Launches what is left of the pass. Throws if that, or an earlier launch, fails.
  void launch_rest();

  /// Makes the current stream wait for the pass, and writes the results into the buckets.
  void wait();

  /// Launches zeros for pass `number`, in the place of a rank that has joined.
  void stand_in(std::uint64_t number);

  /// Takes note of an optimizer, whose gradients kept() gives.
  void add(std::int64_t optimizer, std::weak_ptr<BucketMemory> memory);

  /// The result of BucketMemory::kept(), on a rank that has joined.
  const void* kept(std::int64_t optimizer, std::int64_t number, std::size_t index,
                   std::size_t bytes);

 private:
  /// A planned bucket in the current pass.
  struct State {
    const PlannedBucket* planned;
    bool full = false;
    std::optional<c10::Event> ready;  // if it is full before an earlier one
    std::vector<Launched> launched;
  };

  // Under mutex_:
  State* find(const BucketMemory& optimizer, std::size_t bucket);
  void launch_full();
  void launch(State& state);

  std::mutex mutex_;  // guards all below
  Launcher launcher_;
  std::map<std::int64_t, std::weak_ptr<BucketMemory>> optimizers_;
  std::uint64_t first_ = 0;
  std::vector<std::vector<PlannedBucket>> passes_;
  std::vector<State> states_;  // of the current pass, in the order of launches
  std::size_t next_ = 0;       // the first that is not launched
  std::exception_ptr error_;   // of a launch during the pass: the end of the pass throws it
};

/// The answer of a join to the other ranks, which tell it of the passes that they enter, and ask
/// (Request::allocate): launches zeros for passes that are planned. `run_ahead` may be null.
std::function<void*(std::span<const std::int64_t>)> standing_in(
    std::shared_ptr<RunAhead> run_ahead);

}  // namespace torch_ring
