// SPDX-License-Identifier: Apache-2.0
#include "nccl/loader.h"

#include <dlfcn.h>

#include <array>

#include "core/error.h"
#include "core/symbols.h"

namespace torch_ring::nccl {

namespace {

// NCCL, then AMD's RCCL, which has the same functions.
constexpr std::array kSonames{"libnccl.so.2", "librccl.so.1"};

void* open(const std::string& path) {
  std::string why;
  const auto load = [&](const char* name, int flags) {
    void* const library = dlopen(name, RTLD_NOW | flags);
    if (!library && why.empty()) why = dlerror();
    return library;
  };
  if (!path.empty()) {
    if (void* library = load(path.c_str(), RTLD_LOCAL)) return library;
  } else {
    // torch's copy first: two copies in a process would not know each other.
    for (const char* name : kSonames) {
      if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
    }
    for (const char* name : kSonames) {
      if (void* library = load(name, RTLD_LOCAL)) return library;
    }
  }
  throw Error(ErrorKind::kInvalidArgument,
              "tensors on GPUs need NCCL, which cannot be loaded: " + why +
                  ". Install a build of torch with CUDA, or say where NCCL (on AMD's GPUs: RCCL) "
                  "is (TORCH_RING_NCCL_LIBRARY)");
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 10'000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Api load(const std::string& path) {
  void* library = open(path);
  const Symbols symbols(library, "ncclGetVersion", path.empty() ? kSonames[0] : path,
                        "NCCL " + version_text(kOldestVersion) + " or newer");
  Result (*const get_version)(int*) = symbols["ncclGetVersion"];
  int version = 0;
  if (get_version(&version) != Result::kSuccess || version < kOldestVersion) {
    throw Error(ErrorKind::kInvalidArgument, symbols.path() + " is NCCL " + version_text(version) +
                                                 "; " + version_text(kOldestVersion) +
                                                 " or newer is needed");
  }
  return {symbols, version};
}

}  // namespace torch_ring::nccl
