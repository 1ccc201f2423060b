#include "bindings/launcher.h"

#include "bindings/requests.h"

namespace torch_ring {

Launched Launcher::allreduce(const at::Tensor& tensor, int op, double prescale, double postscale,
                             const Engine::Interrupt& interrupt) const {
  std::shared_ptr<Engine> engine = engine_.lock();
  if (!engine) throw Error(ErrorKind::kInternal, "torch_ring was shut down");
  Request request = allreduce_request(tensor, tensor, "launched", op, prescale, postscale, size_);
  if (request.fingerprint.on_host()) {
    throw Error(ErrorKind::kInvalidArgument,
                request.fingerprint.describe() + ": only reductions on a device are launched");
  }
  OutputEvent written(tensor.device());
  written.follow(request);
  engine->launch(
      request.fingerprint,
      [&](Communicator& communicator, Buffers&) {
        request.begin();
        communicator.allreduce(request.input, request.output, request.fingerprint.count(),
                               reduction_of(request.fingerprint, communicator));
        request.finish();
      },
      interrupt);
  return {std::move(engine), tensor, std::move(written)};
}

}  // namespace torch_ring
