// SPDX-License-Identifier: Apache-2.0
// RankClaim: answers processes that want to be the same rank as this one.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "control/link.h"
#include "core/fd.h"

namespace torch_ring {

/// See torch_ring/setup/claim.py. A process that asks has bound its socket to a name that contains
/// its start time. If it was started before this world began, nobody can tell to which of two jobs
/// each of the two processes belongs: it is refused, however late it asks, because the other ranks
/// may be those of a mixed world, too. A world that began a short while ago ends as well.
///
/// Thread: one at a time. Blocking: no.
class RankClaim {
 public:
  /// `listener`: none where the job's name is unique. `overlap`: the age from which on no question
  /// ends the world: it has trained, and probably has all ranks of its job.
  explicit RankClaim(Fd listener, std::chrono::milliseconds overlap = std::chrono::minutes(1));

  void add_to(PollSet& polls);
  /// Answers processes that ask. Returns one that ends this world, because it may belong to it.
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
