// part(): the end of the control connections of a rank that leaves.
#pragma once

#include <chrono>
#include <list>

#include "control/control_link.h"

namespace torch_ring {

/// For so long a rank that leaves waits for peers that neither read its goodbye nor close: TCP
/// sends a segment that is lost five times again in 6 s, and six times in 13 s.
inline constexpr std::chrono::milliseconds kPartingPatience{10'000};

/// Sends what the links have queued, ends their sending sides, and drops what still arrives, until
/// the peers have closed theirs: they have read all of it then. A socket that is closed earlier may
/// be reset by what arrives, and take unsent bytes with it. `links` is empty afterwards.
///
/// Blocking: until all peers have closed, `patience` at most.
void part(std::list<ControlLink>& links, std::chrono::milliseconds patience);

}  // namespace torch_ring
