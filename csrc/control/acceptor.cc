// SPDX-License-Identifier: Apache-2.0
#include "control/acceptor.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <iterator>
#include <string_view>
#include <system_error>
#include <utility>

#include "control/outgoing.h"
#include "core/failpoint.h"
#include "core/limits.h"

namespace torch_ring {

namespace {

// Pause of a listener without free descriptors: poll() would report it ready again and again.
constexpr std::chrono::milliseconds kPause{50};

/// The process at the other end of a Unix socket; none if it is another user's.
std::optional<pid_t> process_of_this_user(int fd) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  const bool is_this_users = ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) == 0 &&
                             credentials.uid == ::getuid();
  return is_this_users ? std::optional(credentials.pid) : std::nullopt;
}

bool is_name_of_rival(const sockaddr_un& name, socklen_t bytes) {
  using namespace std::string_view_literals;
  constexpr std::size_t kHead = offsetof(sockaddr_un, sun_path);
  return bytes > kHead &&
         std::string_view(name.sun_path, bytes - kHead).starts_with("\0torch_ring/rival/"sv);
}

std::size_t room() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 8;
  return std::clamp<std::size_t>(limit.rlim_cur / 4, 8, Acceptor::kStrangers);
}

}  // namespace

Acceptor::Acceptor(std::uint32_t rank, const Key& key, Fd unix_listener,
                   std::vector<Fd> tcp_listeners, std::shared_ptr<const TlsContext> tls)
    : rank_(rank), key_(key), tls_(std::move(tls)), room_(room()) {
  if (unix_listener) listeners_.push_back({std::move(unix_listener), true});
  for (Fd& listener : tcp_listeners) listeners_.push_back({std::move(listener), false});
  for (const Listener& listener : listeners_) {
    const int flags = ::fcntl(listener.socket.get(), F_GETFL);
    if (flags < 0 || ::fcntl(listener.socket.get(), F_SETFL, flags | O_NONBLOCK) < 0) {
      throw_errno("fcntl(O_NONBLOCK) of a listener");
    }
  }
}

std::vector<Acceptor::Arrival> Acceptor::admit(const PollSet& polls, Clock::time_point now) {
  std::vector<Arrival> arrivals;
  std::erase_if(strangers_, [&](Stranger& stranger) {
    return (polls.ready(stranger.slot) && advance(stranger, arrivals)) ||
           now >= stranger.since + kPatience;
  });
  for (Listener& listener : listeners_) {
    if (polls.ready(listener.slot)) accept(listener, now);
  }
  return arrivals;
}

void Acceptor::accept(Listener& listener, Clock::time_point now) {
  const auto note = [&](const std::string& error) {
    if (!trouble_) troubled_ = now;
    trouble_ = Error(ErrorKind::kInternal, error);
  };
  while (strangers_.size() < room_ || make_room(now)) {
    sockaddr_un from{};  // of an address of TCP only the first bytes
    socklen_t bytes = sizeof from;
    Fd socket(::accept4(listener.socket.get(), reinterpret_cast<sockaddr*>(&from), &bytes,
                        SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      const int error = errno;
      if (error == EINTR || error == ECONNABORTED) continue;
      if (error == EAGAIN || error == EWOULDBLOCK) return trouble_.reset();
      if (is_local(error) && make_room(now)) continue;
      // Other errors are of connections that failed before they were accepted (accept(2)), or
      // concern this process.
      pause_ = now + kPause;
      if (is_local(error) || error == EINVAL || error == EBADF) {
        note("accept: " + std::generic_category().message(error) + limit_to_raise(error));
      }
      return;
    }
    if (failpoint("handshake.accepting", static_cast<int>(rank_))) continue;
    if (listener.unix) {
      const std::optional<pid_t> process = process_of_this_user(socket.get());
      if (!process) continue;
      if (is_name_of_rival(from, bytes)) {
        rival_ = process;
        continue;
      }
    }
    try {
      auto authentication =
          Authentication::accepting(std::move(socket), key_, listener.unix ? nullptr : tls_, rank_);
      strangers_.push_back({std::move(authentication), listener.unix, now});
    } catch (const Error& error) {  // there is no memory for TLS
      pause_ = now + kPause;
      return note(error.what());
    }
    trouble_.reset();
  }
}

bool Acceptor::make_room(Clock::time_point now) {
  const auto newest =
      std::find_if(strangers_.rbegin(), strangers_.rend(),
                   [&](const Stranger& stranger) { return now >= stranger.yields(); });
  if (newest == strangers_.rend()) return false;
  strangers_.erase(std::prev(newest.base()));
  return true;
}

bool Acceptor::advance(Stranger& stranger, std::vector<Arrival>& arrivals) {
  try {
    if (stranger.authentication.advance() != 0) return true;
  } catch (const Error&) {
    return true;  // not a rank of this world
  }
  stranger.has_spoken = true;
  if (!stranger.authentication.done()) return false;
  const Hello hello = stranger.authentication.hello();
  arrivals.push_back({hello, stranger.authentication.take(), stranger.unix});
  return true;
}

void Acceptor::add_to(PollSet& polls, Clock::time_point now) {
  const auto yields = [&](const Stranger& stranger) { return now >= stranger.yields(); };
  listens_ =
      now >= pause_ && (strangers_.size() < room_ || std::ranges::any_of(strangers_, yields));
  for (Listener& listener : listeners_) {
    listener.slot = listens_ ? polls.add(listener.socket.get(), POLLIN) : PollSet::kNone;
  }
  for (Stranger& stranger : strangers_) {
    const Authentication& authentication = stranger.authentication;
    stranger.slot = polls.add(authentication.fd(), authentication.sends() ? POLLOUT : POLLIN);
  }
}

Clock::time_point Acceptor::due() const {
  auto due = Clock::time_point::max();
  if (!strangers_.empty()) due = strangers_.front().since + kPatience;
  if (listens_) return due;
  if (pause_ > Clock::now()) return std::min(due, pause_);
  for (const Stranger& stranger : strangers_) due = std::min(due, stranger.yields());
  return due;
}

std::optional<Error> Acceptor::trouble(Clock::time_point now) const {
  if (!trouble_ || now < troubled_ + kTrouble) return std::nullopt;
  // Not a copy: copies of an exception share their text, which may be read while trouble_ is reset.
  return Error(trouble_->kind(), std::string(trouble_->what()));
}

void Acceptor::append_descriptors(std::vector<int>& fds) const {
  for (const Listener& listener : listeners_) fds.push_back(listener.socket.get());
  for (const Stranger& stranger : strangers_) fds.push_back(stranger.authentication.fd());
}

void Acceptor::close() {
  listeners_.clear();
  strangers_.clear();
}

}  // namespace torch_ring
