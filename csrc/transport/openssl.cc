// SPDX-License-Identifier: Apache-2.0
#include "transport/openssl.h"

#include <dlfcn.h>

#include <array>

#include "core/error.h"
#include "core/symbols.h"

namespace torch_ring::openssl {

namespace {

constexpr std::array kSonames{"libssl.so.3", "libssl.so.1.1"};
constexpr const char* kNeeded = "OpenSSL 1.1.1b or newer, which TORCH_RING_TLS needs";
constexpr unsigned long kOldest = 0x1010102f;  // 1.1.1b

void* open() {
  for (const char* name : kSonames) {
    if (void* loaded = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  }
  std::string why;
  for (const char* name : kSonames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    if (why.empty()) why = dlerror();
  }
  throw Error(ErrorKind::kInvalidArgument,
              std::string("TORCH_RING_TLS needs OpenSSL 1.1.1b or newer, and it cannot be "
                          "loaded: ") +
                  why);
}

Api loaded() {
  void* library = open();
  const Symbols symbols(library, "SSL_new", "libssl", kNeeded);
  unsigned long (*const version_number)() = symbols["OpenSSL_version_num"];
  const char* (*const version)(int) = symbols["OpenSSL_version"];
  if (version_number() < kOldest) symbols.fail(std::string("is ") + version(0));
  return {symbols, version(0)};
}

}  // namespace

const Api& load() {
  static const Api& api = *new Api(loaded());  // threads may use it while the process exits
  return api;
}

}  // namespace torch_ring::openssl
