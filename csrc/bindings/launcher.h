// Launcher: allreduces on a device that the ranks start without an agreement.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "bindings/streams.h"
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

/// Launches the allreduces of one process set. All ranks launch the same in the same order.
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

}  // namespace torch_ring
