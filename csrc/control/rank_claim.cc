// SPDX-License-Identifier: Apache-2.0
#include "control/rank_claim.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <ctime>
#include <string_view>

namespace torch_ring {

namespace {

using namespace std::string_view_literals;

constexpr std::string_view kAsks = "\0torch_ring/ask/"sv;  // then: milliseconds since the boot
constexpr char kIsOthers = 'o';
constexpr char kIsSame = 's';

std::int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);  // the clock of /proc/<pid>/stat
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

/// The start time of the process that has bound this name; none if it does not ask.
std::optional<std::int64_t> started_ms(std::string_view name) {
  if (!name.starts_with(kAsks)) return std::nullopt;
  std::int64_t started = 0;
  const char* const first = name.data() + kAsks.size();
  const auto end = std::from_chars(first, name.data() + name.size(), started);
  return end.ec == std::errc() ? std::optional(started) : std::nullopt;
}

}  // namespace

RankClaim::RankClaim(Fd listener, std::chrono::milliseconds overlap)
    : listener_(std::move(listener)), began_ms_(now_ms()), overlap_ms_(overlap.count()) {}

void RankClaim::add_to(PollSet& polls) {
  slot_ = listener_ ? polls.add(listener_.get(), POLLIN) : PollSet::kNone;
}

std::optional<pid_t> RankClaim::check(const PollSet& polls) {
  std::optional<pid_t> same;
  if (!polls.ready(slot_)) return same;
  while (true) {
    sockaddr_un from{};
    socklen_t length = sizeof from;
    const Fd asking(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &length,
                              SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!asking) {
      // Without descriptors it cannot answer, and poll() would not sleep any more.
      if (errno != EAGAIN && errno != EINTR) listener_.reset();
      return same;
    }
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(asking.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) continue;
    if (peer.uid != ::getuid() || length < offsetof(sockaddr_un, sun_path)) continue;
    const auto started = started_ms({from.sun_path, length - offsetof(sockaddr_un, sun_path)});
    if (!started) continue;
    const bool is_same = *started <= began_ms_;
    if (is_same && now_ms() - began_ms_ < overlap_ms_) same = peer.pid;
    // The other end has room for a byte, or is gone.
    [[maybe_unused]] const auto sent =
        ::send(asking.get(), is_same ? &kIsSame : &kIsOthers, 1, MSG_NOSIGNAL);
  }
}

}  // namespace torch_ring
