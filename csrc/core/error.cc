// SPDX-License-Identifier: Apache-2.0
#include "core/error.h"

#include <cerrno>
#include <system_error>

#include "core/limits.h"

namespace torch_ring {

void throw_errno(const std::string& call) {
  const int error = errno;
  throw Error(ErrorKind::kInternal,
              call + ": " + std::generic_category().message(error) + limit_to_raise(error));
}

}  // namespace torch_ring
