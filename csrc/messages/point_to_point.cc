// SPDX-License-Identifier: Apache-2.0
#include "messages/point_to_point.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "control/news.h"
#include "core/at.h"

namespace torch_ring {

namespace {

/// The sockets on which a rank sends its messages, or receives them. Those to higher ranks and
/// those to lower ranks have different numbers (kMessagesUp).
class MessageSockets final : public SocketSource {
 public:
  MessageSockets(ControlPlane& plane, std::uint64_t set, std::vector<int> members, int rank,
                 std::size_t width, bool sends)
      : members_(std::move(members)), own_(at(members_, rank)), sends_(sends) {
    up_ = plane.sockets(set | kMessagesUp, members_, static_cast<int>(width));
    down_ = plane.sockets(set | kMessagesDown, members_, static_cast<int>(width));
  }

  std::vector<Socket> take(int peer, bool needed) override {
    const bool is_higher = at(members_, peer) > own_;
    return (is_higher == sends_ ? up_ : down_)->take(peer, needed);
  }

 private:
  const std::vector<int> members_;
  const int own_;  // in the world
  const bool sends_;
  std::unique_ptr<SocketSource> up_;
  std::unique_ptr<SocketSource> down_;
};

}  // namespace

PointToPoint::PointToPoint(ControlPlane& plane, std::uint64_t set, std::vector<int> members,
                           MessagesWorld world)
    : plane_(plane),
      set_(set),
      members_(std::move(members)),
      world_(std::move(world)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw_errno("eventfd");
}

PointToPoint::Request PointToPoint::post(MessageSpec spec) {
  check(spec);
  auto request = std::make_shared<MessageRequest>(std::move(spec));
  start();
  {
    const std::scoped_lock lock(mutex_);
    if (inbox_.cause) {
      throw Error(inbox_.cause->kind(), "rank " + std::to_string(world_.rank) +
                                            ": the messages have ended: " + inbox_.cause->what());
    }
    if (world_.recorder) world_.recorder->posted(request);
    inbox_.posted.push_back(request);
  }
  wake();
  return request;
}

void PointToPoint::check(const MessageSpec& spec) const {
  const auto size = static_cast<int>(members_.size());
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kInvalidArgument, "rank " + std::to_string(world_.rank) + ": " + why);
  };
  if (!spec.peer && spec.is_send) refuse("a send needs a destination");
  if (!spec.peer) return;
  if (*spec.peer < 0 || *spec.peer >= size) {
    refuse("a message's other rank is " + std::to_string(*spec.peer) + ", and the set has " +
           std::to_string(size));
  }
  if (*spec.peer == world_.rank) refuse("a rank sends no message to itself");
}

void PointToPoint::start() {
  const std::scoped_lock life(life_);
  if (closed_ || thread_.joinable()) return;
  thread_ = std::thread([this] { run(); });
  for (const std::uint64_t number : {set_ | kMessagesUp, set_ | kMessagesDown}) {
    plane_.subscribe(number, members_, *this);
  }
  on_connected();  // for connections made before it subscribed
}

void PointToPoint::close() {
  const std::scoped_lock life(life_);
  if (std::exchange(closed_, true)) return;
  end(Error(ErrorKind::kInternal, "torch_ring was shut down"));
  if (thread_.joinable()) thread_.join();
  for (const std::uint64_t number : {set_ | kMessagesUp, set_ | kMessagesDown}) {
    plane_.unsubscribe(number);
  }
}

void PointToPoint::run() {
  MessagesWorld world = world_;
  world.probe = [this](int peer) {
    return
        [this, number = plane_.probe(at(members_, peer))] { return plane_.has_answered(number); };
  };
  const auto sockets = [this](bool sends) {
    return std::make_unique<MessageSockets>(plane_, set_, members_, world_.rank, world_.width,
                                            sends);
  };
  std::optional<MessageProtocol> protocol;
  Inbox news;
  while (true) {
    try {
      if (!protocol) protocol.emplace(world, sockets(true), sockets(false));
      news = take_inbox();
      for (const Request& request : news.posted) protocol->post(request);
      if (news.cause) return protocol->fail_all(*news.cause);
      for (const auto& [rank, why] : news.departures) protocol->depart(rank, why);
      if (news.connected) protocol->look_for_connections();
      if (!protocol->advance(Clock::now())) pause(*protocol);
      continue;
    } catch (const Error& error) {
      if (end(error)) plane_.fail(set_, error);
    } catch (const std::exception& error) {  // such as bad_alloc
      const Error cause(ErrorKind::kInternal, error.what());
      if (end(cause)) plane_.fail(set_, cause);
    }
    // The protocol, if there is one, may lack some of them.
    const bool has_failed_before = news.cause.has_value();
    if (!protocol) news = take_inbox();
    for (const Request& request : news.posted) request->finish(cause());
    if (!protocol || has_failed_before) return;
  }
}

Error PointToPoint::cause() {
  const std::scoped_lock lock(mutex_);
  return *inbox_.cause;
}

PointToPoint::Inbox PointToPoint::take_inbox() {
  const std::scoped_lock lock(mutex_);
  Inbox news = std::exchange(inbox_, {});
  inbox_.cause = news.cause;
  return news;
}

/// Sleeps until there is something to do.
void PointToPoint::pause(const MessageProtocol& protocol) const {
  std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
  protocol.add_to(fds);
  int timeout = -1;
  if (const auto due = protocol.due(); due != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Clock::now()) +
                      std::chrono::milliseconds(1);
    timeout = static_cast<int>(
        std::clamp<std::int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
  }
  ::poll(fds.data(), fds.size(), timeout);
  eventfd_t rings = 0;
  ::eventfd_read(wake_.get(), &rings);
}

void PointToPoint::wake() const { ::eventfd_write(wake_.get(), 1); }

/// Ends all messages; returns whether this is the first cause.
bool PointToPoint::end(const Error& cause) {
  {
    const std::scoped_lock lock(mutex_);
    if (inbox_.cause) return false;
    inbox_.cause = cause;
  }
  wake();
  return true;
}

void PointToPoint::on_lost(int, const std::string& how) { end(Error(ErrorKind::kPeerLost, how)); }

void PointToPoint::on_departed(int rank, std::optional<std::uint64_t>, const std::string& why) {
  const auto place = std::ranges::find(members_, rank) - members_.begin();
  {
    const std::scoped_lock lock(mutex_);
    inbox_.departures.emplace_back(static_cast<int>(place), why);
  }
  wake();
}

void PointToPoint::on_failed(int rank, ErrorKind kind, const std::string& why) {
  const auto place = std::ranges::find(members_, rank) - members_.begin();
  const ErrorKind here = kind == ErrorKind::kTimeout ? kind : ErrorKind::kPeerLost;
  end(Error(here, at(world_.labels, place) + " failed: " + why));
}

void PointToPoint::on_connected() {
  {
    const std::scoped_lock lock(mutex_);
    inbox_.connected = true;
  }
  wake();
}

}  // namespace torch_ring
