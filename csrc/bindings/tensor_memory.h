// check_tensor(), values_of(), ...: whether a tensor's memory can be sent or written to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

#include "core/error.h"

namespace torch_ring {

/// Refuses a tensor without memory of its own, or on a device that is not known. `what` begins the
/// message, here and below. Errors: Error(kInvalidArgument).
void check_tensor(const at::Tensor& tensor, const std::string& what);

/// Refuses a tensor of which several elements share a place in memory, or that has none.
/// Errors: Error(kInvalidArgument).
void check_writable(const at::Tensor& tensor, const std::string& what);

/// Whether the tensor's memory holds its values, one after the other.
bool is_plain(const at::Tensor& tensor);

/// The values of `tensor` in memory, one after the other. Values that torch only flags as negated,
/// as conjugated or as all zero become so in memory.
at::Tensor values_of(const at::Tensor& tensor);

/// Calls `function`; an error of torch's becomes Error(kInternal), without its C++ stack.
template <typename Function>
auto torch_call(const Function& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw Error(ErrorKind::kInternal, error.what_without_backtrace());
  }
}

}  // namespace torch_ring
