// SPDX-License-Identifier: Apache-2.0
// limit_to_raise(): the limit that a user can raise when this process lacks a resource.
#pragma once

#include <string>

namespace torch_ring {

/// The limit to raise after an errno that means no more descriptors, threads or memory, as the end
/// of a message: ": raise `ulimit -n` (now 128)". Empty for others.
std::string limit_to_raise(int error);

}  // namespace torch_ring
