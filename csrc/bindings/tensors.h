// Between torch's tensors and the engine's requests.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "engine/request.h"

namespace torch_ring {

/// Errors: Error(kInvalidArgument) for a dtype that no transport carries.
DType dtype_of(const at::Tensor& tensor);

/// The requests of the public operations. Each checks its tensors, keeps them alive until the work
/// is done, and copies to and from contiguous memory where it must.
/// Errors: Error(kInvalidArgument).
Request allreduce_request(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                          int op, double prescale, double postscale);
Request broadcast_request(const at::Tensor& tensor, const at::Tensor& output, int root, int size,
                          std::string name);
/// `result` becomes the gathered tensor.
Request allgather_request(const at::Tensor& tensor, std::shared_ptr<at::Tensor> result,
                          std::string name);
Request barrier_request(std::string name);

}  // namespace torch_ring
