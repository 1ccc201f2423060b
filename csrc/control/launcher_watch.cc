#include "control/launcher_watch.h"

#include <poll.h>
#include <unistd.h>

#include <csignal>

namespace torch_ring {

void LauncherWatch::add_to(PollSet& polls) {
  slot_ = pidfd_ ? polls.add(pidfd_.get(), POLLIN) : PollSet::kNone;
}

Clock::time_point LauncherWatch::due() const {
  return deadline_.value_or(Clock::time_point::max());
}

void LauncherWatch::look(const PollSet& polls, Clock::time_point now) {
  if (deadline_ && now >= *deadline_) ::kill(::getpid(), SIGKILL);
  if (!polls.ready(slot_)) return;
  pidfd_.reset();
  deadline_ = now + kPatience;
  const std::string line = text_ + '\n';
  // There is nobody to tell if this fails.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  ::kill(::getpid(), SIGTERM);
}

}  // namespace torch_ring
