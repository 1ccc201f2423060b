// RankClaim: answers processes that come to be the rank which this process is already.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "control/link.h"
#include "core/fd.h"

namespace torch_ring {

/// See torch_ring/setup/claim.py. A process that asks has bound its socket to a name that says
/// when it was started. If that was before this world began, nobody can tell for which of two jobs
/// each of the two processes was meant: it is refused, however late it comes, for the rest of the
/// ranks may be those of a mixed world, too. A world that began a short while ago ends as well.
///
/// Thread: one at a time. Blocking: no.
class RankClaim {
 public:
  /// `listener`: none where the name of the job tells it from all others. `overlap`: the age of a
  /// world that asking ends no more; it has trained, and all the ranks of its job may be in it.
  explicit RankClaim(Fd listener, std::chrono::milliseconds overlap = std::chrono::minutes(1));

  void add_to(PollSet& polls);
  /// Answers processes that ask. Returns one that ends this world: it may have been meant for it.
  std::optional<pid_t> check(const PollSet& polls);
  void close() { listener_.reset(); }

  int fd() const noexcept { return listener_.get(); }

 private:
  Fd listener_;
  const std::int64_t began_ms_;  // since the boot
  const std::int64_t overlap_ms_;
  std::size_t slot_ = PollSet::kNone;
};

}  // namespace torch_ring
