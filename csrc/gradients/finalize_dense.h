// DenseFinalizer: the fast path of backward synchronisation, without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gradients/gradient_hooks.h"
#include "gradients/pass_agreement.h"

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
  DenseFinalizer(std::shared_ptr<GradientHooks> hooks, std::size_t optimizer,
                 GradientHooks::Bitmap everything, std::vector<std::size_t> buckets, int op,
                 double prescale, double postscale);

  /// Sends `report` to the other ranks, and reduces the gradients if all ranks report the same.
  ///
  /// Returns nullopt, and sends nothing, if a gradient is not due here, or not finite, or if this
  /// rank has given up a pass. Returns the ranks' reports, one after the other, and reduces
  /// nothing, if they differ or a rank has joined; Python handles these. Returns an empty string if
  /// all gradients are reduced and `agreement` has finished, as it also has if the interrupt throws
  /// during the reduction.
  std::optional<std::string> run(Engine& engine, int size, PassAgreement& agreement,
                                 const std::string& report,
                                 const Engine::Interrupt& interrupt) const;

 private:
  void reduce(Engine& engine, int size, std::uint64_t number,
              const Engine::Interrupt& interrupt) const;

  const std::shared_ptr<GradientHooks> hooks_;
  const std::size_t optimizer_;
  const GradientHooks::Bitmap everything_;
  const std::vector<std::size_t> buckets_;
  const int op_;
  const double prescale_;
  const double postscale_;
};

}  // namespace torch_ring
