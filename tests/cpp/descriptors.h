// SPDX-License-Identifier: Apache-2.0
// DescriptorLimit and open_descriptors(): the descriptors of this process.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "harness.h"

namespace torch_ring::test {

/// Limits the descriptors of this process while it lives: their numbers are below `count`.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(int count) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    set(static_cast<rlim_t>(count));
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

  void raise() const { set(before_.rlim_max); }

 private:
  void set(rlim_t count) const {
    const rlimit limit{count, before_.rlim_max};
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  rlimit before_{};
};

/// The number of open descriptors, among them one that reads the folder; of the kind "socket:".
inline int open_descriptors(const std::string& kind = "") {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    count += std::filesystem::read_symlink(entry.path(), gone).string().starts_with(kind);
  }
  return count;
}

}  // namespace torch_ring::test
