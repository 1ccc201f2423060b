// SPDX-License-Identifier: Apache-2.0
#include "ucx/loader.h"

#include <dlfcn.h>

#include "core/error.h"
#include "core/symbols.h"

namespace torch_ring::ucx {

namespace {

constexpr const char* kSoname = "libucp.so.0";
constexpr unsigned kOldestMinor = 16;

Symbols symbols_of(void* library, const std::string& path) {
  return {library, "ucp_get_version", path,
          "UCX 1." + std::to_string(kOldestMinor) + " or a newer one of version 1"};
}

/// Two libucp in one process would share the other libraries of one of them.
void* open(const std::string& path) {
  void* const loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD);
  if (loaded && path.empty()) return loaded;
  if (loaded && dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD) != loaded) {
    throw Error(ErrorKind::kInvalidArgument,
                path + " cannot be loaded: this process has another UCX, " +
                    symbols_of(loaded, kSoname).path());
  }
  const char* name = path.empty() ? kSoname : path.c_str();
  if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  throw Error(ErrorKind::kInvalidArgument, std::string("UCX cannot be loaded: ") + dlerror());
}

}  // namespace

Api load(const std::string& path) {
  void* library = open(path);
  const Symbols symbols = symbols_of(library, path.empty() ? kSoname : path);
  Api api{};
  api.path = symbols.path();
  void (*get_version)(unsigned*, unsigned*, unsigned*) = nullptr;
  symbols.get(get_version, "ucp_get_version");
  symbols.get(api.version_string, "ucp_get_version_string");
  api.version = api.version_string();
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  get_version(&major, &minor, &release);
  if (major != 1 || minor < kOldestMinor) symbols.fail("is " + api.version);

  symbols.get(api.status_string, "ucs_status_string");
  symbols.get(api.config_read, "ucp_config_read");
  symbols.get(api.config_modify, "ucp_config_modify");
  symbols.get(api.config_release, "ucp_config_release");
  symbols.get(api.init, "ucp_init_version");
  symbols.get(api.cleanup, "ucp_cleanup");
  symbols.get(api.worker_create, "ucp_worker_create");
  symbols.get(api.worker_destroy, "ucp_worker_destroy");
  symbols.get(api.worker_get_address, "ucp_worker_get_address");
  symbols.get(api.worker_release_address, "ucp_worker_release_address");
  symbols.get(api.worker_get_efd, "ucp_worker_get_efd");
  symbols.get(api.worker_arm, "ucp_worker_arm");
  symbols.get(api.worker_progress, "ucp_worker_progress");
  symbols.get(api.ep_create, "ucp_ep_create");
  symbols.get(api.ep_close, "ucp_ep_close_nbx");
  symbols.get(api.ep_query, "ucp_ep_query");
  symbols.get(api.tag_send, "ucp_tag_send_nbx");
  symbols.get(api.tag_probe, "ucp_tag_probe_nb");
  symbols.get(api.tag_message_receive, "ucp_tag_msg_recv_nbx");
  symbols.get(api.request_check_status, "ucp_request_check_status");
  symbols.get(api.request_free, "ucp_request_free");
  return api;
}

}  // namespace torch_ring::ucx
