// require_parts(), ...: what the operations of torch.distributed check of their tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "engine/request.h"

namespace torch_ring {

using Tensors = std::vector<at::Tensor>;

/// `what` begins the message of each. Errors: Error(kInvalidArgument).

[[noreturn]] void refuse(const std::string& why);

/// Refuses to go on in another process than `process`.
void refuse_in_child_of(::pid_t process);

void require_as_many(const char* what, std::size_t outputs, std::size_t inputs);

/// One part for each rank.
void require_size(const char* what, std::size_t parts, int size);

/// The dtype and device of `whole`.
void require_like(const char* what, const at::Tensor& part, const at::Tensor& whole);

/// One part for each rank, each with the dtype, device and number of elements of `own`.
void require_parts(const char* what, const Tensors& parts, const at::Tensor& own, int size);

/// Makes the requests members of one operation, which run together.
void group(std::vector<Request>& requests);

}  // namespace torch_ring
