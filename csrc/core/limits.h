// limit_to_raise: what a user can do about a resource that this process lacks.
#pragma once

#include <string>

namespace torch_ring {

/// For an errno that says that this process may have no more descriptors, threads or memory: which
/// limit to raise, as the end of a message: ": raise `ulimit -n` (now 128)". Empty for others.
std::string limit_to_raise(int error);

}  // namespace torch_ring
