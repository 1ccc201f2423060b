// SPDX-License-Identifier: Apache-2.0
#include "gradients/end_pass.h"

#include <algorithm>
#include <utility>

#include "bindings/requests.h"
#include "engine/request.h"

namespace torch_ring {

namespace {

/// An interrupt that defers its first exception; a second one is not deferred. The counterpart of
/// interrupt_deferred() (torch_ring/world/engine.py), which sets signal handlers twice a pass: a
/// reduction in C++ does without those system calls. Thread: one.
class DeferredInterrupt {
 public:
  /// `interrupt` outlives this, and this the waits that are given function().
  explicit DeferredInterrupt(const Engine::Interrupt& interrupt) : interrupt_(interrupt) {}

  Engine::Interrupt function() {
    return [this] { call(); };
  }

  std::exception_ptr take() { return std::exchange(deferred_, nullptr); }

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

/// A reduction, and the object that makes it.
using Plain = std::pair<const PassDecision::Reduction*, const PlainReduction*>;

/// The reductions of a decision; nullopt if the ranks have more to do than these.
std::optional<std::vector<Plain>> all_plain(
    const PassDecision& decision, const std::vector<std::shared_ptr<PlainReduction>>& plain) {
  const bool is_usual = !decision.given_up && !decision.out_of_step &&
                        !decision.has_another_round && !decision.has_digests;
  if (!is_usual) return std::nullopt;
  std::vector<Plain> all;
  for (const PassDecision::Reduction& each : decision.reductions) {
    const auto found = std::ranges::find(plain, each.optimizer, &PlainReduction::optimizer);
    if (found == plain.end() || !(*found)->takes(each)) return std::nullopt;
    all.emplace_back(&each, found->get());
  }
  return all;
}

}  // namespace

PlainReduction::PlainReduction(std::shared_ptr<GradientHooks> hooks, std::size_t optimizer,
                               std::vector<Bitmap> buckets, int op, double prescale,
                               double postscale, double rescale)
    : hooks_(std::move(hooks)),
      optimizer_(optimizer),
      buckets_(std::move(buckets)),
      op_(op),
      prescale_(prescale),
      postscale_(postscale),
      rescale_(rescale) {}

bool PlainReduction::add_report(PassReport& report, int rank) const {
  const GradientHooks::Pending pending = hooks_->pending(GradientHooks::Due::kNow);
  if (pending.unready) return false;
  if (pending.any()) {
    report.gradients.push_back(hooks_->report(pending, optimizer_, false, false, rank));
  }
  return true;
}

bool PlainReduction::takes(const PassDecision::Reduction& reduction) const {
  const bool is_plain = !reduction.sparse.any() && !reduction.unlike.any() &&
                        reduction.order.empty() && reduction.not_finite.empty();
  return is_plain && std::ranges::all_of(buckets_, [&](const Bitmap& bucket) {
           const Bitmap touched = bucket & reduction.touched;
           return !touched.any() || touched == bucket;
         });
}

void PlainReduction::prepare(const PassDecision::Reduction& reduction, const Bitmap& due,
                             std::uint64_t number, int size, std::size_t active,
                             std::vector<Request>& requests) const {
  hooks_->require_unchanged(reduction.touched);
  hooks_->carry(reduction.carried);
  hooks_->drop_averaged(reduction.touched - due - reduction.carried);
  hooks_->move_into_buckets(reduction.touched, rescale_ * size / static_cast<double>(active));
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (!(buckets_[i] & reduction.touched).any()) continue;
    const at::Tensor memory = hooks_->memory(i);
    requests.push_back(allreduce_request(memory, memory, bucket_name(optimizer_, number, i, 0), op_,
                                         prescale_, postscale_, size));
  }
}

void PlainReduction::finish(const PassDecision::Reduction& reduction) const {
  hooks_->mark_reduced(reduction.touched);
}

void PassEnd::run(Engine& engine, int size, PassAgreement& agreement, const PassReport& report,
                  const std::map<std::size_t, std::size_t>& parameters,
                  const std::vector<std::shared_ptr<PlainReduction>>& plain,
                  const Engine::Interrupt& interrupt) {
  reports_ = agreement.gather(engine, report, interrupt);
  own_ = report.due();
  decision_ = decide(reports_, static_cast<std::size_t>(size), parameters);
  const auto reductions = all_plain(decision_, plain);
  if (!reductions) return;

  DeferredInterrupt deferred(interrupt);
  try {
    std::vector<Request> requests;
    for (const auto& [reduction, reducer] : *reductions) {
      const auto own = own_.find(reduction->optimizer);
      reducer->prepare(*reduction, own == own_.end() ? Bitmap() : own->second, agreement.number(),
                       size, reports_.size(), requests);
    }
    agreement.begin_reduction();  // an interrupt before this leaves the agreement to the next pass
    for (const auto& work : engine.submit(std::move(requests), Engine::Mode::kBlocking)) {
      engine.wait(*work, deferred.function());
    }
    for (const auto& [reduction, reducer] : *reductions) reducer->finish(*reduction);
  } catch (const Error&) {  // an error on all ranks, after which they may continue
    agreement.finish();
    throw;
  } catch (const c10::Error&) {
    agreement.finish();
    throw;
  }
  agreement.finish();
  is_reduced_ = true;
  interrupt_ = deferred.take();
}

bool PassEnd::run_plain(Engine& engine, int size, int rank, PassAgreement& agreement,
                        std::uint64_t steps,
                        const std::vector<std::shared_ptr<PlainReduction>>& plain,
                        const Engine::Interrupt& interrupt) {
  PassReport report{.steps = steps, .gave_up = !agreement.failure().empty()};
  std::map<std::size_t, std::size_t> parameters;
  for (const auto& each : plain) {
    if (!each->add_report(report, rank)) return false;
    parameters.emplace(each->optimizer(), each->hooks().parameters());
  }
  const auto is_due = [](const GradientReport& each) { return each.due.any(); };
  if (std::ranges::none_of(report.gradients, is_due)) return false;
  run(engine, size, agreement, report, parameters, plain, interrupt);
  return true;
}

bool PassEnd::is_complete() const {
  return is_reduced_ && decision_.open.empty() && decision_.incomplete.empty() &&
         !decision_.is_of_step;
}

}  // namespace torch_ring
