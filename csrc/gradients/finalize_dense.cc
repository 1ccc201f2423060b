#include "gradients/finalize_dense.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "bindings/requests.h"
#include "engine/request.h"

namespace torch_ring {

namespace {

/// An interrupt that defers its first exception until rethrow(); a second one is not deferred. The
/// counterpart of interrupt_deferred() (torch_ring/world/engine.py), which sets signal handlers
/// twice a pass. The fast path cannot afford those system calls; it waits in C++, and calls the
/// program's handler itself. Thread: one.
class DeferredInterrupt {
 public:
  /// `interrupt` outlives this, and this the waits that are given function().
  explicit DeferredInterrupt(const Engine::Interrupt& interrupt) : interrupt_(interrupt) {}

  Engine::Interrupt function() {
    return [this] { call(); };
  }

  void rethrow() {
    if (deferred_) std::rethrow_exception(deferred_);
  }

 private:
  void call() {
    if (!interrupt_) return;
    try {
      interrupt_();
    } catch (...) {
      if (std::exchange(deferred_, std::current_exception())) throw;
    }
  }

  const Engine::Interrupt& interrupt_;
  std::exception_ptr deferred_;
};

}  // namespace

DenseFinalizer::DenseFinalizer(std::shared_ptr<GradientHooks> hooks, std::size_t optimizer,
                               Bitmap everything, std::vector<std::size_t> buckets, int op,
                               double prescale, double postscale)
    : hooks_(std::move(hooks)),
      optimizer_(optimizer),
      everything_(std::move(everything)),
      buckets_(std::move(buckets)),
      op_(op),
      prescale_(prescale),
      postscale_(postscale) {}

std::optional<PassReports> DenseFinalizer::run(Engine& engine, int size, PassAgreement& agreement,
                                               std::uint64_t steps,
                                               const Engine::Interrupt& interrupt) const {
  if (!agreement.failure().empty()) return std::nullopt;
  const GradientHooks::Pending pending = hooks_->pending(GradientHooks::Due::kNow);
  const bool any_sparse = pending.sparse.any();
  const bool is_usual = !any_sparse && !pending.accumulating && !pending.unsure.any();
  if (pending.due != everything_ || !is_usual || pending.unready) return std::nullopt;
  if (!hooks_->not_finite(everything_, /*rank=*/0).empty()) return std::nullopt;
  const PassReport report{
      .steps = steps,
      .gradients = {{.optimizer = optimizer_, .due = everything_, .carried = pending.carried}}};
  const PassReports gathered = agreement.gather(engine, report, interrupt);
  const bool all_are_here = gathered.size() == static_cast<std::size_t>(size);
  const bool all_tell_the_same =
      std::ranges::all_of(gathered, [&](const auto& other) { return *other == report; });
  if (!all_are_here || !all_tell_the_same) return gathered;

  DeferredInterrupt deferred(interrupt);
  agreement.begin_reduction();
  try {
    hooks_->require_unchanged(everything_);
    hooks_->carry(pending.carried);
    reduce(engine, size, agreement.number(), deferred.function());
  } catch (const Error&) {  // an error on all ranks, after which they may continue
    agreement.finish();
    throw;
  } catch (const c10::Error&) {
    agreement.finish();
    throw;
  }
  agreement.finish();
  deferred.rethrow();
  return PassReports();
}

void DenseFinalizer::reduce(Engine& engine, int size, std::uint64_t number,
                            const Engine::Interrupt& interrupt) const {
  hooks_->move_into_buckets(everything_, 1.0);  // all are open: none is scaled
  std::vector<Request> requests;
  for (const std::size_t bucket : buckets_) {
    const at::Tensor memory = hooks_->memory(bucket);
    requests.push_back(allreduce_request(memory, memory, bucket_name(optimizer_, number, bucket, 0),
                                         op_, prescale_, postscale_, size));
  }
  for (const auto& work : engine.submit(std::move(requests), Engine::Mode::kBlocking)) {
    engine.wait(*work, interrupt);
  }
  hooks_->mark_reduced(everything_);
}

}  // namespace torch_ring
