#include "control/outgoing.h"

#include <sys/socket.h>

#include <cerrno>
#include <system_error>

#include "core/failpoint.h"
#include "core/limits.h"

namespace torch_ring {

namespace {

std::string message_of(int error) {
  return std::generic_category().message(error) + (is_local(error) ? limit_to_raise(error) : "");
}

}  // namespace

Outgoing::Outgoing(const Address& address, bool unix, const Key& key, const Hello& hello)
    : to_(address, unix), key_(key), hello_(hello) {}

Outgoing::Outgoing(const Address& address, bool unix, std::chrono::milliseconds interval,
                   Clock::time_point now)
    : to_(address, unix), probe_(interval), retry_(now + interval) {}

Outgoing::State Outgoing::advance(const PollSet& polls, Clock::time_point now) {
  if (socket_ ? !polls.ready(slot_) : now < retry_) return State::kPending;
  if (!handshake_) {
    const State state = connect(now);
    if (state != State::kDone) return state;
    if (probe_) {
      socket_.reset();
      retry_ = now + *probe_;
      return state;
    }
    if (failpoint("handshake.connecting", static_cast<int>(hello_.from))) {
      return fail("failpoint", ECONNRESET, now);
    }
    handshake_ = Handshake::connecting(key_, hello_);
  }
  return shake_hands(now);
}

/// kDone: it is connected.
Outgoing::State Outgoing::connect(Clock::time_point now) {
  if (!socket_) {
    socket_ = Fd(::socket(to_.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_) return fail("socket", errno, now);
  }
  // Called again, it tells how the first call has ended.
  if (::connect(socket_.get(), to_.generic(), to_.bytes) == 0 || errno == EISCONN) {
    return State::kDone;
  }
  if (errno == EINPROGRESS || errno == EALREADY || errno == EINTR) return State::kPending;
  return fail("connect", errno, now);
}

Outgoing::State Outgoing::shake_hands(Clock::time_point now) {
  try {
    const int error = advance_handshake(*handshake_, socket_.get());
    if (error != 0) return fail("handshake", error, now);
  } catch (const Error& error) {
    fail("handshake", ECONNRESET, now);
    trouble_ = error.what();
    // Something that is no peer has its port: the peer may still come back, as far as this knows.
    if (error.kind() != ErrorKind::kPeerLost) throw;
    return State::kPending;
  }
  return handshake_->done() ? State::kDone : State::kPending;
}

Outgoing::State Outgoing::fail(const char* call, int error, Clock::time_point now) {
  const bool refused = error == ECONNREFUSED && !handshake_;
  socket_.reset();
  handshake_.reset();
  retry_ = now + probe_.value_or(kRetry);
  trouble_ = call + (": " + message_of(error));
  if (is_local(error)) throw Error(ErrorKind::kInternal, trouble_);
  return refused ? State::kRefused : State::kPending;
}

void Outgoing::add_to(PollSet& polls) {
  slot_ = PollSet::kNone;
  if (!socket_) return;
  const bool sends = !handshake_ || !handshake_->outgoing().empty();
  slot_ = polls.add(socket_.get(), sends ? POLLOUT : POLLIN);
}

int advance_handshake(Handshake& handshake, int fd) {
  while (true) {
    if (const auto outgoing = handshake.outgoing(); !outgoing.empty()) {
      const auto sent = ::send(fd, outgoing.data(), outgoing.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent > 0) handshake.sent(static_cast<std::size_t>(sent));
      if (sent >= 0 || errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
    }
    if (handshake.done()) return 0;
    const auto incoming = handshake.incoming();
    if (incoming.empty()) return ECONNRESET;  // this end has refused the other
    const auto received = ::recv(fd, incoming.data(), incoming.size(), MSG_DONTWAIT);
    if (received == 0) return ECONNRESET;
    if (received > 0) handshake.received(static_cast<std::size_t>(received));
    if (received > 0 || errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
  }
}

bool is_local(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ||
         error == EACCES || error == EPERM;
}

}  // namespace torch_ring
