// SPDX-License-Identifier: Apache-2.0
// PassEnd: the ranks' common end of a backward pass, or beginning of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "gradients/bitmap.h"
#include "gradients/decide.h"
#include "gradients/gradient_hooks.h"
#include "gradients/pass_agreement.h"
#include "gradients/report.h"

namespace torch_ring {

/// Reduces the gradients of an optimizer whose buckets lie in host memory, and are sent as they are
/// at the end of the pass.
///
/// Thread: the one that runs backward(), without the GIL. Blocking: no.
class PlainReduction {
 public:
  /// `optimizer`: its index on the process set. `buckets`: the parameters of each one, none of
  /// those without elements. `op`, `prescale` and `postscale` are the allreduces'. `rescale`
  /// multiplies an averaged gradient that all ranks send again (move_into_buckets()).
  PlainReduction(std::shared_ptr<GradientHooks> hooks, std::size_t optimizer,
                 std::vector<Bitmap> buckets, int op, double prescale, double postscale,
                 double rescale);

  std::size_t optimizer() const { return optimizer_; }
  const GradientHooks& hooks() const { return *hooks_; }

  /// Adds this rank's report of the pass, if there is one; returns false if it is not ready
  /// (GradientHooks::Pending). `rank`: this one.
  bool add_report(PassReport& report, int rank) const;

  /// Whether these gradients are dense, finite, and all those of their buckets, and their averaged
  /// parts are alike on all ranks.
  bool takes(const PassDecision::Reduction& reduction) const;

  /// Prepares the gradients, and adds the requests of their buckets. `due`: those that this rank
  /// has reported. `number`: that of the agreement. `size`: of the process set; `active` ranks of
  /// it have not joined.
  void prepare(const PassDecision::Reduction& reduction, const Bitmap& due, std::uint64_t number,
               int size, std::size_t active, std::vector<Request>& requests) const;

  /// The buckets of these gradients are reduced.
  void finish(const PassDecision::Reduction& reduction) const;

 private:
  const std::shared_ptr<GradientHooks> hooks_;
  const std::size_t optimizer_;
  const std::vector<Bitmap> buckets_;
  const int op_;
  const double prescale_;
  const double postscale_;
  const double rescale_;
};

/// The common end of a backward pass, or beginning of a step.
///
/// Thread: the one that runs backward(), without the GIL. Blocking: until every rank has agreed.
/// Errors: the engine's; an error of the reduction is one on all ranks, and finishes the agreement.
class PassEnd {
 public:
  /// Sends `report` (PassAgreement::gather()), decides, and reduces the gradients if the ranks have
  /// nothing else to tell each other, and `plain` takes all of them. `size`: of the process set.
  /// `parameters`: their numbers, by optimizer.
  void run(Engine& engine, int size, PassAgreement& agreement, const PassReport& report,
           const std::map<std::size_t, std::size_t>& parameters,
           const std::vector<std::shared_ptr<PlainReduction>>& plain,
           const Engine::Interrupt& interrupt);

  /// The same at the end of a pass, if all optimizers are plain and have nothing else to tell.
  /// Returns false, and sends nothing, if no gradient is due here, or one is not ready.
  bool run_plain(Engine& engine, int size, int rank, PassAgreement& agreement, std::uint64_t steps,
                 const std::vector<std::shared_ptr<PlainReduction>>& plain,
                 const Engine::Interrupt& interrupt);

  const PassReports& reports() const { return reports_; }
  const PassDecision& decision() const { return decision_; }

  /// The gradients that are due in this rank's report.
  const std::map<std::size_t, Bitmap>& own() const { return own_; }

  /// Whether the agreement has finished; else the caller reduces.
  bool is_reduced() const { return is_reduced_; }

  /// Whether it has, and no rank has anything left to reduce before a step.
  bool is_complete() const;

  /// Throws the interrupt that came during the reduction, if any.
  void rethrow_interrupt() const {
    if (interrupt_) std::rethrow_exception(interrupt_);
  }

 private:
  PassReports reports_;
  std::map<std::size_t, Bitmap> own_;
  PassDecision decision_;
  bool is_reduced_ = false;
  std::exception_ptr interrupt_;
};

}  // namespace torch_ring
