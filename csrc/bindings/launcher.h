// Launcher: allreduces on a device that the ranks start without an agreement.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "bindings/streams.h"
#include "engine/engine.h"

namespace torch_ring {

/// A launched allreduce. Thread: any, without the GIL. Blocking: no.
class Launched {
 public:
  Launched(std::shared_ptr<Engine> engine, at::Tensor tensor, OutputEvent written)
      : engine_(std::move(engine)), tensor_(std::move(tensor)), written_(std::move(written)) {}

  /// Makes the current stream wait for the result. Errors: the engine's fatal cause.
  void wait() const {
    engine_->check();
    written_.wait(tensor_);
  }

 private:
  std::shared_ptr<Engine> engine_;
  at::Tensor tensor_;
  OutputEvent written_;
};

/// Launches the allreduces of one process set. All ranks launch the same in the same order.
/// Thread: one at a time, without the GIL. Blocking: as Engine::launch().
/// Errors: the engine's.
class Launcher {
 public:
  Launcher(std::weak_ptr<Engine> engine, int size) : engine_(std::move(engine)), size_(size) {}

  /// Reduces a tensor in place, after what is on the current stream.
  Launched allreduce(const at::Tensor& tensor, int op, double prescale, double postscale) const;

 private:
  const std::weak_ptr<Engine> engine_;
  const int size_;
};

}  // namespace torch_ring
