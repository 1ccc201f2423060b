// SPDX-License-Identifier: Apache-2.0
// load(): finds and loads NCCL, at the first tensor on a GPU.
#pragma once

#include <string>

#include "nccl/api.h"

namespace torch_ring::nccl {

/// The oldest NCCL that understands Config.
inline constexpr int kOldestVersion = 21805;

/// Loads `path`; if that is empty, the libnccl.so.2 that this process has loaded (torch's), or else
/// the system's. The library is never unloaded. Thread: any. Errors: Error(kInvalidArgument) if
/// there is no NCCL, or it is too old.
Api load(const std::string& path = "");

/// "2.27.3" for 22703.
std::string version_text(int version);

}  // namespace torch_ring::nccl
