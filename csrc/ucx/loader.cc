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
  void (*const get_version)(unsigned*, unsigned*, unsigned*) = symbols["ucp_get_version"];
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  get_version(&major, &minor, &release);
  if (major != 1 || minor < kOldestMinor) {
    const char* (*const version)() = symbols["ucp_get_version_string"];
    symbols.fail(std::string("is ") + version());
  }
  return {symbols};
}

}  // namespace torch_ring::ucx
