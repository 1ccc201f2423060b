// LauncherWatch: ends this process after its launcher has died.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "control/poll_set.h"
#include "core/clock.h"
#include "core/fd.h"

namespace torch_ring {

/// A launcher ends its ranks before it ends itself, unless it is killed. Ranks that are left behind
/// would hold their processors and devices until somebody finds them. So they end as a launcher
/// ends them: by SIGTERM, which the program may handle, and by SIGKILL after kPatience.
///
/// Thread: one at a time. Blocking: no.
class LauncherWatch {
 public:
  static constexpr std::chrono::seconds kPatience{30};  // torchrun's

  /// `pidfd`: of the launcher; none: nothing is watched. `text`: the line for stderr.
  LauncherWatch(Fd pidfd, std::string text) : pidfd_(std::move(pidfd)), text_(std::move(text)) {}

  void add_to(PollSet& polls);
  /// When to call look() although nothing is ready.
  Clock::time_point due() const;
  /// Does what is due.
  void look(const PollSet& polls, Clock::time_point now);

  int fd() const noexcept { return pidfd_.get(); }

 private:
  Fd pidfd_;
  const std::string text_;
  std::optional<Clock::time_point> deadline_;  // of this process, whose launcher has died
  std::size_t slot_ = PollSet::kNone;
};

}  // namespace torch_ring
