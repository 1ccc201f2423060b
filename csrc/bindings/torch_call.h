// SPDX-License-Identifier: Apache-2.0
// torch_call(): errors of torch as ours.
#pragma once

#include <c10/util/Exception.h>

#include "core/error.h"

namespace torch_ring {

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
