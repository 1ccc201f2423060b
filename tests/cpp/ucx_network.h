// SPDX-License-Identifier: Apache-2.0
// ucx_network(): UCX for tests, over tcp on the loopback interface.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "harness.h"
#include "ucx/loader.h"
#include "ucx/stream.h"

namespace torch_ring::test {

/// The library that TORCH_RING_UCX_LIBRARY names, or the system's; none if there is none.
inline const std::optional<ucx::Api>& ucx_api() {
  static const std::optional<ucx::Api> api = []() -> std::optional<ucx::Api> {
    ::setenv("UCX_TLS", "tcp", 0);
    ::setenv("UCX_NET_DEVICES", "lo", 0);
    ::setenv("UCX_HANDLE_ERRORS", "none", 0);
    const char* path = std::getenv("TORCH_RING_UCX_LIBRARY");
    try {
      return ucx::load(path ? path : "");
    } catch (const Error&) {
      return std::nullopt;
    }
  }();
  return api;
}

inline std::shared_ptr<Network> ucx_network(int rank) {
  return std::make_shared<ucx::UcxNetwork>(*ucx_api(), Key{}, rank);
}

/// Not under ThreadSanitizer, which does not see the locks of a library that is not compiled for
/// it.
inline bool has_ucx() {
#ifdef __SANITIZE_THREAD__
  return false;
#else
  return ucx_api().has_value();
#endif
}

/// Registers a test that needs UCX; without UCX, an empty test with a note in its name.
inline bool add_ucx_test(const std::string& name, const std::function<void()>& body) {
  if (has_ucx()) return add_test(name, body);
  return add_test(name + " (skipped: UCX cannot be loaded)", [] {});
}

}  // namespace torch_ring::test
