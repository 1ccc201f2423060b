// SPDX-License-Identifier: Apache-2.0
// Symbols: the functions of a library that was loaded by dlopen().
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>

#include "core/error.h"

namespace torch_ring {

/// Thread: one at a time. Errors: Error(kInvalidArgument) that names the library and the version
/// that is needed.
class Symbols {
 public:
  /// `name`: a function of the library, by which its path is found; `otherwise`: the path if it is
  /// not found. `needed`: "NCCL 2.18 or newer".
  Symbols(void* library, const char* name, std::string otherwise, std::string needed)
      : library_(library), path_(std::move(otherwise)), needed_(std::move(needed)) {
    Dl_info info{};
    void* const function = dlsym(library, name);
    if (function && dladdr(function, &info) && info.dli_fname) path_ = info.dli_fname;
  }

  const std::string& path() const noexcept { return path_; }

  /// Converts to a pointer to a function of any type.
  struct Function {
    void* address;
    template <class Type>
    operator Type*() const {
      return reinterpret_cast<Type*>(address);
    }
  };
  Function operator[](const char* name) const {
    void* const address = dlsym(library_, name);
    if (!address) fail(std::string("has no ") + name);
    return {address};
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorKind::kInvalidArgument, path_ + " " + why + ": it is not " + needed_);
  }

 private:
  void* library_;
  std::string path_;
  std::string needed_;
};

}  // namespace torch_ring
