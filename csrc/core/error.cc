#include "core/error.h"

#include <cerrno>
#include <system_error>

namespace torch_ring {

void throw_errno(const std::string& call) {
  throw Error(ErrorKind::kInternal, call + ": " + std::generic_category().message(errno));
}

}  // namespace torch_ring
