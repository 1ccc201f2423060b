#include "engine/watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine/request.h"

namespace torch_ring {

namespace {

constexpr std::size_t kHeaderBytes = 4;
constexpr std::size_t kTextBytes = 4096;

// A departed rank's last posts may still be on their way to this one; after this they are not.
constexpr std::chrono::milliseconds kDepartureGrace{250};

}  // namespace

Watchdog::Watchdog(int rank, std::vector<Fd> control, std::vector<std::string> labels,
                   std::chrono::milliseconds heartbeat_timeout, Abort& abort,
                   std::function<void()> raised)
    : rank_(rank),
      labels_(std::move(labels)),
      heartbeat_timeout_(heartbeat_timeout),
      abort_(abort),
      raised_(std::move(raised)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw_errno("eventfd");
  for (std::size_t peer = 0; peer < control.size(); ++peer) {
    if (!control[peer]) continue;
    peers_.push_back({static_cast<int>(peer), std::move(control[peer]), {}, Clock::now()});
  }
  if (!peers_.empty()) thread_ = std::thread([this] { run(); });
}

void Watchdog::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  ::eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
  peers_.clear();
}

void Watchdog::announce(const Error& cause) {
  {
    const std::scoped_lock lock(mutex_);
    if (!announcement_) announcement_ = cause;
  }
  ::eventfd_write(wake_.get(), 1);
}

void Watchdog::check_departures() const {
  const auto first = departure();
  if (first && Clock::now() - first->since > kDepartureGrace) throw departed(first->rank);
}

Error Watchdog::root_cause(const Error& error) const {
  if (error.kind() != ErrorKind::kPeerLost) return error;
  auto first = departure();
  const auto since = Clock::now();
  // Peers may still be finishing a collective in which the departed rank took part, which raising
  // the abort at once would spoil.
  while (!abort_.raised() && Clock::now() - (first ? first->since : since) < kDepartureGrace) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!first) first = departure();
  }
  return first ? departed(first->rank) : error;
}

std::optional<Watchdog::Departure> Watchdog::departure() const {
  const std::scoped_lock lock(mutex_);
  return departure_;
}

Error Watchdog::departed(int rank) const {
  return {ErrorKind::kPeerLost,
          at(labels_, rank) + " has left: it called shutdown() or exited. " + kAllRanksMustCall};
}

void Watchdog::run() {
  const auto interval = heartbeat_timeout_ / 4;
  auto next_heartbeat = Clock::now();
  std::vector<pollfd> fds(peers_.size() + 1);
  while (true) {
    for (std::size_t i = 0; i < peers_.size(); ++i) fds[i] = {peers_[i].socket.get(), POLLIN, 0};
    fds.back() = {wake_.get(), POLLIN, 0};
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(next_heartbeat - Clock::now()).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));

    if (fds.back().revents != 0) {
      eventfd_t rings = 0;
      ::eventfd_read(wake_.get(), &rings);
      std::unique_lock lock(mutex_);
      const bool stopping = stopping_;
      const auto announcement = std::exchange(announcement_, std::nullopt);
      lock.unlock();
      if (announcement) send_all(Message::kAbort, announcement->kind(), announcement->what());
      if (stopping) {
        send_all(Message::kGoodbye, ErrorKind::kPeerLost, "");
        return;
      }
    }
    // Messages are received before silence is judged: a process that was itself stopped for a while
    // finds its peers' heartbeats waiting here.
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (fds[i].revents != 0) receive(peers_[i]);
    }
    const auto now = Clock::now();
    for (const Peer& peer : peers_) {
      if (peer.socket && !peer.departed && now - peer.heard > heartbeat_timeout_) {
        lose(peer, "has not been heard for " + in_seconds(heartbeat_timeout_) +
                       " (TORCH_RING_HEARTBEAT_TIMEOUT): it is stopped, or its host is cut off");
      }
    }
    if (now >= next_heartbeat) {
      send_all(Message::kHeartbeat, ErrorKind::kPeerLost, "");
      next_heartbeat = now + interval;
    }
  }
}

void Watchdog::receive(Peer& peer) {
  char buffer[kHeaderBytes + kTextBytes];
  const ssize_t bytes = ::recv(peer.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (bytes <= 0) {
    peer.socket.reset();  // from now on poll() ignores the peer
    if (!peer.departed) lose(peer, "died: its connection closed; see its output");
    return;
  }
  peer.heard = Clock::now();
  peer.received.append(buffer, static_cast<std::size_t>(bytes));
  while (peer.received.size() >= kHeaderBytes) {
    std::uint16_t text_bytes = 0;
    std::memcpy(&text_bytes, peer.received.data() + 2, sizeof text_bytes);
    const std::size_t message_bytes = kHeaderBytes + std::min<std::size_t>(text_bytes, kTextBytes);
    if (peer.received.size() < message_bytes) return;
    const auto message = static_cast<Message>(peer.received[0]);
    const auto kind = static_cast<ErrorKind>(peer.received[1]);
    const std::string text = peer.received.substr(kHeaderBytes, message_bytes - kHeaderBytes);
    peer.received.erase(0, message_bytes);
    handle(peer, message, kind, text);
  }
}

void Watchdog::handle(Peer& peer, Message message, ErrorKind kind, const std::string& text) {
  switch (message) {
    case Message::kHeartbeat:
      return;
    case Message::kGoodbye: {
      peer.departed = true;
      {
        const std::scoped_lock lock(mutex_);
        if (!departure_) departure_ = Departure{peer.rank, Clock::now()};
      }
      raised_();
      return;
    }
    case Message::kAbort:
      abort_.raise(Error(kind == ErrorKind::kTimeout ? kind : ErrorKind::kPeerLost,
                         label(peer) + " failed: " + text));
      raised_();
      return;
    case Message::kLost:
      if (abort_.raise(Error(ErrorKind::kPeerLost, label(peer) + " says that " + text))) raised_();
      return;
  }
  lose(peer, "sent something that is no control message");
}

void Watchdog::lose(const Peer& peer, const std::string& how) {
  const Error cause(ErrorKind::kPeerLost, label(peer) + ' ' + how);
  if (!abort_.raise(cause)) return;
  // The peers learn of the loss before this rank leaves because of it: otherwise a peer that has
  // not noticed it would take this rank's goodbye for the cause.
  send_all(Message::kLost, cause.kind(), cause.what());
  raised_();
}

void Watchdog::send_all(Message message, ErrorKind kind, const std::string& text) {
  const auto text_bytes = static_cast<std::uint16_t>(std::min(text.size(), kTextBytes));
  std::string frame{static_cast<char>(message), static_cast<char>(kind)};
  frame.append(reinterpret_cast<const char*>(&text_bytes), sizeof text_bytes);
  frame.append(text, 0, text_bytes);
  for (const Peer& peer : peers_) {
    // A full socket buffer means that the peer does not read: the watchdog notices its silence.
    if (peer.socket)
      ::send(peer.socket.get(), frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

}  // namespace torch_ring
