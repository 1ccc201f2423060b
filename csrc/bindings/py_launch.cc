#include "bindings/py_launch.h"

#include "bindings/blocking_call.h"
#include "bindings/py_work.h"
#include "bindings/requests.h"

namespace torch_ring {

PyLaunch launch_allreduce(std::shared_ptr<Engine> engine, const at::Tensor& tensor, int op,
                          double prescale, double postscale, int size) {
  Request request = allreduce_request(tensor, tensor, "launched", op, prescale, postscale, size);
  if (request.fingerprint.on_host()) {
    throw Error(ErrorKind::kInvalidArgument,
                request.fingerprint.describe() + ": only reductions on a device are launched");
  }
  OutputEvent written(tensor.device());
  written.follow(request);
  {
    const BlockingCall no_gil;
    engine->launch(
        [&](Communicator& communicator, Buffers&) {
          request.begin();
          communicator.allreduce(request.input, request.output, request.fingerprint.count(),
                                 reduction_of(request.fingerprint, communicator));
          request.finish();
        },
        kCheckSignals);
  }
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return {std::move(engine), tensor, std::move(written)};
}

}  // namespace torch_ring
