#include "transport/doorbell.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "core/error.h"

namespace torch_ring {

Fd Doorbell::make_event_fd() {
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw_errno("eventfd");
  return Fd(fd);
}

void Doorbell::ring_always() const noexcept {
  const std::uint64_t one = 1;
  // EAGAIN (the counter is full) means that the doorbell has been rung already.
  [[maybe_unused]] const auto written = ::write(event_fd_.get(), &one, sizeof one);
}

void Doorbell::poll_until(Clock::time_point deadline, std::span<const pollfd> fds) const {
  std::array<pollfd, 16> all{};
  const std::size_t count = std::min(fds.size(), all.size() - 1);
  std::copy_n(fds.begin(), count, all.begin());
  all[count] = {event_fd_.get(), POLLIN, 0};
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  const auto milliseconds = std::clamp<std::int64_t>(left, 0, 60'000);
  ::poll(all.data(), count + 1, static_cast<int>(milliseconds));
  if (all[count].revents != 0) {
    std::uint64_t rings = 0;
    [[maybe_unused]] const auto taken = ::read(event_fd_.get(), &rings, sizeof rings);
  }
}

}  // namespace torch_ring
