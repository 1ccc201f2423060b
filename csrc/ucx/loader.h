// SPDX-License-Identifier: Apache-2.0
// load(): finds and loads UCX.
#pragma once

#include <string>

#include "ucx/api.h"

namespace torch_ring::ucx {

/// Loads `path`; if that is empty, the libucp.so.0 that this process has loaded, or else the
/// system's. The library is never unloaded. Thread: any. Errors: Error(kInvalidArgument) if there
/// is no UCX, if it is older than 1.16, or the process has loaded another one.
///
/// UCX reads its settings (UCX_...) from the environment, some when it is loaded: torch_ring/setup/
/// ucx.py sets them before.
Api load(const std::string& path = "");

}  // namespace torch_ring::ucx
