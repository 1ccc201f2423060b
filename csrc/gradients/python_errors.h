// SPDX-License-Identifier: Apache-2.0
// Errors in the hooks of autograd, which become Python's.
#pragma once

#include <string>

namespace torch_ring {

[[noreturn]] void throw_assertion_error(const std::string& text);
[[noreturn]] void throw_value_error(const std::string& text);
[[noreturn]] void throw_runtime_error(const std::string& text);

}  // namespace torch_ring
