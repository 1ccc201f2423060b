// PyLaunch and launch_allreduce(): a reduction on a device without an agreement.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "bindings/streams.h"
#include "engine/engine.h"

namespace torch_ring {

/// A launched reduction. Thread: any, with the GIL. Blocking: no.
class PyLaunch {
 public:
  PyLaunch(std::shared_ptr<Engine> engine, at::Tensor tensor, OutputEvent written)
      : engine_(std::move(engine)), tensor_(std::move(tensor)), written_(std::move(written)) {}

  /// Whether the tensor holds the result.
  bool done() const { return written_.query(); }

  /// Makes the current stream wait for the result, and returns the tensor. Errors: the engine's
  /// fatal cause.
  at::Tensor wait() const {
    engine_->check();
    written_.wait(tensor_);
    return tensor_;
  }

 private:
  std::shared_ptr<Engine> engine_;
  at::Tensor tensor_;
  OutputEvent written_;
};

/// Launches a reduction of `tensor` in place (Engine::launch), after what is on the current stream.
/// Thread: any, with the GIL; releases it. Errors: Error(kInvalidArgument) for a tensor that is not
/// on a device, and as allreduce_request(); the launch's.
PyLaunch launch_allreduce(std::shared_ptr<Engine> engine, const at::Tensor& tensor, int op,
                          double prescale, double postscale, int size);

}  // namespace torch_ring
