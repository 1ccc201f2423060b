// send_spec(), receive_spec(): messages made of torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "messages/message_request.h"

namespace torch_ring {

/// Both check the tensor, keep it until the request has ended, and copy where its memory is not
/// contiguous. Without a deadline. A received tensor's version is bumped, so that autograd notices.
/// Thread: any, with or without the GIL. Errors: Error(kInvalidArgument); the tensor must be on the
/// CPU.
MessageSpec send_spec(const at::Tensor& tensor, int destination, int tag);
MessageSpec receive_spec(const at::Tensor& tensor, std::optional<int> source, int tag);

}  // namespace torch_ring
