// SPDX-License-Identifier: Apache-2.0
#include "control/outgoing.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "control/news.h"
#include "core/at.h"
#include "core/failpoint.h"
#include "core/limits.h"

namespace torch_ring {

namespace {

std::string message_of(int error) {
  return std::generic_category().message(error) + (is_local(error) ? limit_to_raise(error) : "");
}

}  // namespace

Way way_to(const ControlOptions& options, int peer, std::uint32_t channel) {
  const Address& address = at(options.addresses, peer);
  if (at(options.host_of, peer) == at(options.host_of, options.rank)) {
    return {SocketAddress(address.socket), std::nullopt, {}};
  }
  const auto& own = at(options.addresses, options.rank).tcp;
  const std::size_t interface = channel == Hello::kControl ? 0 : (channel - 1) % own.size();
  const TcpAddress& to = address.tcp[interface];
  if (own.size() == 1) return {SocketAddress(to), std::nullopt, {}};
  const std::string& from = own[interface].host;
  return {SocketAddress(to), SocketAddress(TcpAddress{from, 0}),
          " from " + from + " to " + to.host};
}

Outgoing::Outgoing(const ControlOptions& options, const Hello& hello)
    : way_(way_to(options, static_cast<int>(hello.to), hello.channel)),
      key_(options.key),
      tls_(way_.to.family() == AF_UNIX ? nullptr : options.tls),
      hello_(hello) {}

Outgoing::Outgoing(const ControlOptions& options, int peer, std::chrono::milliseconds interval,
                   Clock::time_point first)
    : way_(way_to(options, peer, Hello::kControl)), probe_(interval), retry_(first) {}

Outgoing::State Outgoing::advance(const PollSet& polls, Clock::time_point now) {
  if (fd() < 0 ? now < retry_ : !polls.ready(slot_)) return State::kPending;
  if (!authentication_) {
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
    authentication_ = Authentication::connecting(std::move(socket_), key_, tls_, hello_);
  }
  return shake_hands(now);
}

/// kDone: the socket is connected.
Outgoing::State Outgoing::connect(Clock::time_point now) {
  if (!socket_) {
    socket_ = Fd(::socket(way_.to.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_) return fail("socket", errno, now);
    if (way_.from) {
      // Lets connect() choose the port, which may be the same for several peers. Without this
      // option bind() chooses one of its own.
      const int on = 1;
      ::setsockopt(socket_.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
      if (::bind(socket_.get(), way_.from->generic(), way_.from->bytes) < 0) {
        return fail("bind", errno, now);
      }
    }
  }
  // A second call reports the outcome of the first.
  if (::connect(socket_.get(), way_.to.generic(), way_.to.bytes) == 0 || errno == EISCONN) {
    return State::kDone;
  }
  if (errno == EINPROGRESS || errno == EALREADY || errno == EINTR) return State::kPending;
  return fail("connect", errno, now);
}

Outgoing::State Outgoing::shake_hands(Clock::time_point now) {
  try {
    const int error = authentication_->advance();
    if (error != 0) return fail("handshake", error, now);
  } catch (const Error& error) {
    fail("handshake", ECONNRESET, now);
    trouble_ = error.what();
    // Another program has the peer's port: the peer may still come back.
    if (error.kind() != ErrorKind::kPeerLost) throw;
    return State::kPending;
  }
  return authentication_->done() ? State::kDone : State::kPending;
}

Outgoing::State Outgoing::fail(const char* call, int error, Clock::time_point now) {
  const bool refused = error == ECONNREFUSED && !authentication_;
  socket_.reset();
  authentication_.reset();
  retry_ = now + probe_.value_or(kRetry);
  trouble_ = call + way_.text + ": " + message_of(error);
  if (is_local(error)) throw Error(ErrorKind::kInternal, trouble_);
  return refused ? State::kRefused : State::kPending;
}

void Outgoing::add_to(PollSet& polls) {
  slot_ = PollSet::kNone;
  if (fd() < 0) return;
  const bool sends = !authentication_ || authentication_->sends();
  slot_ = polls.add(fd(), sends ? POLLOUT : POLLIN);
}

bool is_local(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ||
         error == EACCES || error == EPERM;
}

void DialRequests::add(int peer, Clock::time_point now, bool setup) {
  const auto interval = setup ? std::chrono::milliseconds(kSetupProbe) : kProbe;
  emplace(peer, now, interval, now + interval);
}

void DialRequests::renew(int peer, Clock::time_point now) {
  emplace(peer, now, Outgoing::kRetry, now).renews = true;
}

DialRequests::DialRequest& DialRequests::emplace(int peer, Clock::time_point now,
                                                 std::chrono::milliseconds interval,
                                                 Clock::time_point first) {
  const int rank = options_.rank;
  const Hello hello{static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(peer), 0,
                    Hello::kControl};
  return dials_
      .try_emplace(
          peer, now,
          rank > peer ? Outgoing(options_, hello) : Outgoing(options_, peer, interval, first))
      .first->second;
}

DialRequests::Outcome DialRequests::advance(const PollSet& polls, Clock::time_point now,
                                            bool setup) {
  Outcome outcome;
  for (auto dial = dials_.begin(); dial != dials_.end();) {
    auto& [peer, it] = *dial;
    auto state = Outgoing::State::kPending;
    try {
      state = it.outgoing.advance(polls, now);
    } catch (const Error& error) {
      outcome.error.emplace(peer, error);
      // Another key: the address belongs to another job now.
      if (error.kind() == ErrorKind::kMismatch) state = Outgoing::State::kRefused;
      it.since = now;  // it is not the peer that is silent
    }
    if (!it.outgoing.trouble().empty()) {
      trouble_ = at(options_.labels, peer) + ": " + it.outgoing.trouble();
    }
    if (state == Outgoing::State::kRefused && !it.refused_since) it.refused_since = now;
    if (state == Outgoing::State::kDone) it.refused_since.reset();
    if (state == Outgoing::State::kDone && options_.rank > peer) {
      outcome.connected.emplace_back(peer, it.outgoing.take());
      dial = dials_.erase(dial);
      continue;
    }
    if (it.refused_since && it.renews) {
      outcome.gone.push_back(peer);
    } else if (it.refused_since && (setup || now >= *it.refused_since + kGrace)) {
      outcome.refused.push_back(peer);
    } else if (!setup && now >= it.since + options_.heartbeat_timeout) {
      outcome.silent.push_back(peer);
    }
    ++dial;
  }
  return outcome;
}

void DialRequests::excuse(Clock::time_point now) {
  for (auto& [peer, dial] : dials_) {
    dial.since = now;
    dial.refused_since.reset();
  }
}

void DialRequests::add_to(PollSet& polls) {
  for (auto& [peer, dial] : dials_) dial.outgoing.add_to(polls);
}

Clock::time_point DialRequests::due(bool setup) const {
  auto due = Clock::time_point::max();
  for (const auto& [peer, dial] : dials_) {
    due = std::min(due, dial.outgoing.due());
    if (setup) continue;
    due = std::min(due, dial.since + options_.heartbeat_timeout);
    if (dial.refused_since) due = std::min(due, *dial.refused_since + kGrace);
  }
  return due;
}

void DialRequests::append_descriptors(std::vector<int>& fds) const {
  for (const auto& [peer, dial] : dials_) fds.push_back(dial.outgoing.fd());
}

bool DataConnections::connect(std::uint64_t set, int peer, int width) {
  if (closed_.contains(set)) return false;
  Pair& pair = pairs_[{set, peer}];
  if (!pair.outgoing.empty() || !pair.ready.empty()) return false;
  for (int channel = 1; channel <= width; ++channel) {
    const Hello hello{static_cast<std::uint32_t>(options_.rank), static_cast<std::uint32_t>(peer),
                      set, static_cast<std::uint32_t>(channel)};
    pair.outgoing.emplace_back(options_, hello);
  }
  return true;
}

bool DataConnections::accept(const Hello& hello, Socket socket) {
  if (hello.channel > kChannels || closed_.contains(hello.set)) return false;
  auto& ready = pairs_[{hello.set, static_cast<int>(hello.from)}].ready;
  // A second connection of a name replaces the first, which the peer has given up.
  if (!ready.contains(hello.channel) && untaken_ >= kUntaken) return false;
  untaken_ += ready.insert_or_assign(hello.channel, std::move(socket)).second;
  return true;
}

std::vector<Socket> DataConnections::take(std::uint64_t set, int peer, int width) {
  const auto found = pairs_.find({set, peer});
  if (found == pairs_.end()) return {};
  Pair& pair = found->second;
  if (pair.error) {
    const Error error = *pair.error;
    pairs_.erase(found);
    throw error;
  }
  if (pair.ready.size() < static_cast<std::size_t>(width)) return {};
  std::vector<Socket> sockets;
  for (auto& [channel, socket] : pair.ready) sockets.push_back(std::move(socket));
  if (!connects(set, options_.rank, peer)) untaken_ -= sockets.size();
  taken_ += sockets.size();
  pairs_.erase(found);
  return sockets;
}

std::vector<std::uint64_t> DataConnections::advance(const PollSet& polls, Clock::time_point now) {
  std::vector<std::uint64_t> sets;
  for (auto& [name, pair] : pairs_) {
    if (pair.outgoing.empty()) continue;
    try {
      std::erase_if(pair.outgoing, [&](Outgoing& outgoing) {
        if (outgoing.advance(polls, now) != Outgoing::State::kDone) {
          return pair.gone && outgoing.fd() < 0;
        }
        pair.ready.emplace(outgoing.hello().channel, outgoing.take());
        return true;
      });
    } catch (const Error& error) {
      pair.outgoing.clear();
      pair.ready.clear();
      pair.error = Error(error.kind(), "no connection to " + at(options_.labels, name.second) +
                                           ": " + error.what());
    }
    if (pair.outgoing.empty()) sets.push_back(name.first);
  }
  return sets;
}

void DataConnections::forget(int peer) {
  for (auto& [name, pair] : pairs_) {
    if (name.second != peer) continue;
    pair.gone = true;
    std::erase_if(pair.outgoing, [](const Outgoing& outgoing) { return outgoing.fd() < 0; });
  }
}

std::string DataConnections::trouble(std::uint64_t set, int peer) const {
  const auto found = pairs_.find({set, peer});
  if (found == pairs_.end()) return {};
  for (const Outgoing& outgoing : found->second.outgoing) {
    if (!outgoing.trouble().empty()) return outgoing.trouble();
  }
  return {};
}

bool DataConnections::is_connecting(std::uint64_t set, int peer) const {
  const auto found = pairs_.find({set, peer});
  return found != pairs_.end() && !found->second.outgoing.empty();
}

void DataConnections::close(std::uint64_t set) {
  closed_.insert(set);
  std::erase_if(pairs_, [&](const auto& item) {
    const auto& [name, pair] = item;
    if (name.first != set) return false;
    if (!connects(set, options_.rank, name.second)) untaken_ -= pair.ready.size();
    return true;
  });
}

void DataConnections::add_to(PollSet& polls) {
  for (auto& [name, pair] : pairs_) {
    for (Outgoing& outgoing : pair.outgoing) outgoing.add_to(polls);
  }
}

Clock::time_point DataConnections::due() const {
  auto due = Clock::time_point::max();
  for (const auto& [name, pair] : pairs_) {
    for (const Outgoing& outgoing : pair.outgoing) due = std::min(due, outgoing.due());
  }
  return due;
}

void DataConnections::append_descriptors(std::vector<int>& fds) const {
  for (const auto& [name, pair] : pairs_) {
    for (const auto& [channel, socket] : pair.ready) fds.push_back(socket.get());
    for (const Outgoing& outgoing : pair.outgoing) fds.push_back(outgoing.fd());
  }
}

}  // namespace torch_ring
