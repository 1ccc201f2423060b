// DenseFinalizer: the fast path of backward synchronisation, without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "gradients/gradient_hooks.h"
#include "gradients/pass_agreement.h"
#include "gradients/report.h"

namespace torch_ring {

/// The fast path of BackwardSync (torch_ring/optimizer), for a single optimizer whose gradients are
/// all dense, in host memory and not compressed.
///
/// Thread: the one that runs backward(), without the GIL. Blocking: until every rank has agreed.
/// Errors: the engine's.
class DenseFinalizer {
 public:
  /// `optimizer`: its index on the process set. `everything` has all parameters, `buckets` the
  /// buckets with elements. `op`, `prescale` and `postscale` are the allreduces'.
  DenseFinalizer(std::shared_ptr<GradientHooks> hooks, std::size_t optimizer, Bitmap everything,
                 std::vector<std::size_t> buckets, int op, double prescale, double postscale);

  /// Tells the other ranks that all gradients are due, and reduces them if all ranks tell the same.
  /// `size`: of the process set. `steps`: of all optimizers.
  ///
  /// Returns nullopt, and sends nothing, if a gradient is not due here, or not finite, or if this
  /// rank has given up a pass. Returns the ranks' reports, and reduces nothing, if they differ or a
  /// rank has joined; Python handles these. Returns no report if all gradients are reduced and
  /// `agreement` has finished, as it also has if the interrupt throws during the reduction.
  std::optional<PassReports> run(Engine& engine, int size, PassAgreement& agreement,
                                 std::uint64_t steps, const Engine::Interrupt& interrupt) const;

 private:
  void reduce(Engine& engine, int size, std::uint64_t number,
              const Engine::Interrupt& interrupt) const;

  const std::shared_ptr<GradientHooks> hooks_;
  const std::size_t optimizer_;
  const Bitmap everything_;
  const std::vector<std::size_t> buckets_;
  const int op_;
  const double prescale_;
  const double postscale_;
};

}  // namespace torch_ring
