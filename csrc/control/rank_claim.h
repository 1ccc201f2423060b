// RankClaim: answers processes that come to be the rank which this process is already.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "control/poll_set.h"
#include "core/fd.h"

namespace torch_ring {

/// See torch_ring/rendezvous/claim.py. A process that asks has bound its socket to a name that says
/// when it was started. If that was before this world began, and the world began a short while ago,
/// nobody can tell for which of two jobs each of the two processes was meant.
///
/// Thread: one at a time. Blocking: no.
class RankClaim {
 public:
  /// `listener`: none where the name of the job tells it from all others.
  explicit RankClaim(Fd listener);

  void add_to(PollSet& polls);
  /// Answers who asks. Returns a process that may have been meant for this world.
  std::optional<pid_t> look(const PollSet& polls);
  void close() { listener_.reset(); }

  int fd() const noexcept { return listener_.get(); }

 private:
  Fd listener_;
  const std::int64_t began_ms_;  // since the boot
  std::size_t slot_ = PollSet::kNone;
};

}  // namespace torch_ring
