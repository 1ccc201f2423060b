// SPDX-License-Identifier: Apache-2.0
#include "transport/doorbell.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>

#include "core/error.h"

namespace torch_ring {

namespace {

// sun_path of an abstract name: a zero byte, then the characters.
constexpr std::size_t kNameAt = offsetof(sockaddr_un, sun_path) + 1;
constexpr int kMostRings = 64;  // taken from the socket at a time: a flood must not hold the owner

/// The word as a futex. Not FUTEX_PRIVATE: the peers have mapped it at other addresses.
std::uint32_t* futex_of(std::atomic<std::uint32_t>& state) {
  return reinterpret_cast<std::uint32_t*>(&state);
}
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

void wake_futex(std::atomic<std::uint32_t>& state) noexcept {
  ::syscall(SYS_futex, futex_of(state), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

Fd make_socket() {
  Fd made(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) throw_errno("socket, for a doorbell");
  return made;
}

/// Sends one byte to the socket of that name; returns 0 or errno.
int send_ring(const Fd& from, std::uint64_t name) noexcept {
  std::array<char, sizeof name> characters{};
  std::memcpy(characters.data(), &name, sizeof name);
  const auto* const end = std::find(characters.begin(), characters.end(), '\0');
  const auto count = static_cast<std::size_t>(end - characters.begin());
  if (count == 0) return ENOENT;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, characters.data(), count);
  const auto sent = ::sendto(from.get(), "", 1, MSG_NOSIGNAL | MSG_DONTWAIT,
                             reinterpret_cast<const sockaddr*>(&address),
                             static_cast<socklen_t>(kNameAt + count));
  return sent == 1 ? 0 : errno;
}

}  // namespace

void Doorbell::ring_sleeper(Word& peer) {
  const std::uint32_t state = peer.state.exchange(kAwake, std::memory_order_seq_cst);
  if (state == kInFutex) wake_futex(peer.state);
  if (state != kInPoll) return;
  const std::uint64_t name = peer.name.load(std::memory_order_acquire);
  if (!sender_) sender_ = make_socket();
  int error = send_ring(sender_, name);
  if (error == EAGAIN) {
    // Either the peer's queue is full, so it has been rung already, or other peers have not read
    // too many bytes of this socket. A new socket has sent none.
    sender_ = make_socket();
    error = send_ring(sender_, name);
  }
  if (error == ENOMEM || error == ENOBUFS) {
    errno = error;
    throw_errno("sendto, to wake a peer");
  }
  // Any other error: there is no such socket, so the peer has died, or there is no such peer.
}

void Doorbell::wake_owner() noexcept {
  const std::uint32_t sleeps = sleeps_.load(std::memory_order_seq_cst);
  // A ringer may have reset the word of the next sleep, or may do so now: wake that sleep, too.
  const std::uint32_t state = word_.state.exchange(kAwake, std::memory_order_seq_cst);
  if (sleeps == kInFutex || state == kInFutex) wake_futex(word_.state);
  if (sleeps == kInPoll || state == kInPoll) {
    // EAGAIN can only mean a full queue, as this socket sends to itself alone.
    send_ring(socket_, word_.name.load(std::memory_order_acquire));
  }
}

void Doorbell::open_socket() {
  Fd made = make_socket();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Given only a family, the kernel chooses an abstract name: five characters.
  if (::bind(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(sa_family_t)) != 0) {
    throw_errno("bind, for a doorbell");
  }
  socklen_t bytes = sizeof address;
  if (::getsockname(made.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
    throw_errno("getsockname");
  }
  std::uint64_t name = 0;
  if (bytes <= kNameAt || bytes > kNameAt + sizeof name || address.sun_path[0] != '\0') {
    throw Error(ErrorKind::kInternal, "the kernel gave a doorbell's socket a name of " +
                                          std::to_string(bytes) + " bytes");
  }
  std::memcpy(&name, address.sun_path + 1, bytes - kNameAt);
  socket_ = std::move(made);
  word_.name.store(name, std::memory_order_release);
}

void Doorbell::wait_in_futex(Clock::time_point deadline) const {
  const auto since_start = deadline.time_since_epoch();  // CLOCK_MONOTONIC, which the futex takes
  if (since_start <= Clock::duration::zero()) return;
  const auto seconds = std::chrono::floor<std::chrono::seconds>(since_start);
  const timespec until{
      static_cast<time_t>(seconds.count()),
      static_cast<long>(std::chrono::nanoseconds(since_start - seconds).count()),
  };
  ::syscall(SYS_futex, futex_of(word_.state), FUTEX_WAIT_BITSET, static_cast<int>(kInFutex), &until,
            nullptr, FUTEX_BITSET_MATCH_ANY);
}

void Doorbell::wait_in_poll(Clock::time_point deadline, std::span<const pollfd> fds) const {
  std::array<pollfd, kMostFds + 1> all{};
  const std::size_t count = std::min(fds.size(), all.size() - 1);
  std::copy_n(fds.begin(), count, all.begin());
  all[count] = {socket_.get(), POLLIN, 0};
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  const auto milliseconds = std::clamp<std::int64_t>(left, 0, 60'000);
  ::poll(all.data(), count + 1, static_cast<int>(milliseconds));
  if (all[count].revents == 0) return;
  std::array<char, 1> ring{};
  for (int i = 0; i < kMostRings; ++i) {
    if (::recv(socket_.get(), ring.data(), ring.size(), MSG_DONTWAIT) < 0) return;
  }
}

}  // namespace torch_ring
