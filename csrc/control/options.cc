#include "control/options.h"

#include "core/at.h"
#include "core/error.h"

namespace torch_ring {

void check(const ControlOptions& options) {
  const auto size = options.host_of.size();
  if (options.labels.size() != size || options.addresses.size() != size || options.rank < 0 ||
      options.rank >= options.size()) {
    throw Error(ErrorKind::kInvalidArgument,
                "a control plane needs a host, a label and an address of each rank, and one of the "
                "ranks");
  }
  const int host = at(options.host_of, options.rank);
  for (int peer = 0; peer < options.size(); ++peer) {
    if (peer != options.rank)
      SocketAddress(at(options.addresses, peer), at(options.host_of, peer) == host);
  }
}

}  // namespace torch_ring
