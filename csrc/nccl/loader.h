// load(): finds NCCL when the first tensor on a GPU comes.
#pragma once

#include <string>

#include "nccl/api.h"

namespace torch_ring::nccl {

/// The oldest NCCL that understands Config.
inline constexpr int kOldestVersion = 21805;

/// Loads `path`, or if it is empty the libnccl.so.2 that this process has (torch's), or else the
/// one that the system finds. It is never unloaded. Thread: any. Errors: Error(kInvalidArgument) if
/// there is none, or it is too old.
Api load(const std::string& path = "");

/// "2.27.3" of 22703.
std::string version_text(int version);

}  // namespace torch_ring::nccl
