// PollSet: the descriptors of one poll().
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "core/clock.h"

namespace torch_ring {

/// Made anew for each poll(). Who adds a descriptor keeps its slot, to ask for it afterwards.
class PollSet {
 public:
  /// A slot of no descriptor: never ready.
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::size_t add(int fd, short events) {
    fds_.push_back({fd, events, 0});
    return fds_.size() - 1;
  }

  void wait(Clock::time_point deadline) {
    using std::chrono::milliseconds;
    const auto now = Clock::now();
    const auto left = deadline <= now ? milliseconds(0)
                                      : std::min(std::chrono::ceil<milliseconds>(deadline - now),
                                                 milliseconds(60'000));
    if (::poll(fds_.data(), fds_.size(), static_cast<int>(left.count())) < 0) {
      for (pollfd& fd : fds_) fd.revents = 0;
    }
  }

  /// Whether wait() has found the slot ready: in one of its events, or an error.
  bool ready(std::size_t slot) const { return slot < fds_.size() && fds_[slot].revents != 0; }

 private:
  std::vector<pollfd> fds_;
};

}  // namespace torch_ring
