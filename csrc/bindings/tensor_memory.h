// check_tensor(), values_of(), ...: whether a tensor's memory can be sent or written to.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>

#include "core/error.h"

namespace torch_ring {

/// Refuses a tensor without memory of its own, or on a device that is not known. `what` begins the
/// message, here and below. Errors: Error(kInvalidArgument).
void check_tensor(const at::Tensor& tensor, const std::string& what);

/// Why the tensor's values are not in its memory, if they are not: "is a DTensor, which has no
/// ...". Tensors that wrap others, or that stand for others in a trace, have a storage without
/// memory.
std::optional<std::string> lack_of_memory(const at::Tensor& tensor);

/// Refuses a tensor of which several elements share a place in memory, or that has none.
/// Errors: Error(kInvalidArgument).
void check_writable(const at::Tensor& tensor, const std::string& what);

/// Whether the tensor's memory holds its values, one after the other.
bool is_plain(const at::Tensor& tensor);

/// The values of `tensor` in memory, one after the other. Values that torch only flags as negated,
/// as conjugated or as all zero become so in memory.
at::Tensor values_of(const at::Tensor& tensor);

/// Has torch work for the caller of an operation in any thread: whoever waits makes progress for
/// all, in the modes of its own program. While this lives, the thread is in none of them but, if so
/// asked, in inference mode: where the caller was, if it gets a new tensor, or where a tensor was
/// made that is written to.
class ForCaller {
 public:
  explicit ForCaller(bool in_inference_mode) : inference_(in_inference_mode) {}

 private:
  c10::impl::ForceDispatchKeyGuard no_modes_{c10::default_included_set, c10::default_excluded_set};
  c10::InferenceMode inference_;
  at::NoGradGuard no_grad_;
};

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
