// SPDX-License-Identifier: Apache-2.0
#include "core/limits.h"

#include <sys/resource.h>

#include <cerrno>

namespace torch_ring {

namespace {

/// `unit`: the bytes of one unit of the shell's ulimit.
std::string now(__rlimit_resource_t resource, rlim_t unit) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur / unit);
}

}  // namespace

std::string limit_to_raise(int error) {
  switch (error) {
    case EMFILE:
      return ": raise `ulimit -n` (now " + now(RLIMIT_NOFILE, 1) + ")";
    case ENFILE:
      return ": raise fs.file-max of this host";
    case EAGAIN:
      return ": raise `ulimit -u` (now " + now(RLIMIT_NPROC, 1) + "), or pids.max of the container";
    case ENOMEM:
      return ": raise `ulimit -v` (now " + now(RLIMIT_AS, 1024) +
             "), or give the container more memory";
    default:
      return "";
  }
}

}  // namespace torch_ring
