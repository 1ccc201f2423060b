#include "control/loop.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "control/set_numbers.h"
#include "core/at.h"

namespace torch_ring {

ControlLoop::ControlLoop(ControlOptions options)
    : options_((check(options), ControlOptions{options.rank,
                                               std::move(options.host_of),
                                               std::move(options.labels),
                                               std::move(options.addresses),
                                               options.key,
                                               {},
                                               {},
                                               options.heartbeat_timeout,
                                               {},
                                               {},
                                               {}})),
      rank_(options_.rank),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      subscriptions_(rank_, options_.labels),
      news_(options_.size()),
      neighbourhood_(rank_, options_.host_of),
      entrance_(static_cast<std::uint32_t>(rank_), options_.key, std::move(options.unix_listener),
                std::move(options.tcp_listener)),
      launcher_(std::move(options.launcher), std::move(options.launcher_died)),
      claim_(std::move(options.claim)),
      bids_(options_),
      data_(options_),
      next_heartbeat_(Clock::now()) {
  if (!wake_) throw_errno("eventfd");
  for (const int peer : neighbourhood_.neighbours()) awaited_.insert(peer);
  if (options_.size() > 1) thread_ = std::thread([this] { run(); });
}

std::vector<int> ControlLoop::missing() const {
  const std::scoped_lock lock(mutex_);
  if (setup_error_) throw *setup_error_;
  return {awaited_.begin(), awaited_.end()};
}

std::string ControlLoop::trouble() const {
  const std::scoped_lock lock(mutex_);
  const auto trouble = entrance_.trouble(Clock::now());
  return trouble ? trouble->what() : bids_.trouble();
}

void ControlLoop::stop(Farewell farewell, std::chrono::milliseconds patience) {
  {
    const std::scoped_lock lock(mutex_);
    if (!farewell_) patience_ = patience;
    if (!farewell_) farewell_ = farewell;
  }
  ::eventfd_write(wake_.get(), 1);
  letters_.close();
  if (thread_.joinable()) thread_.join();
  const std::scoped_lock lock(mutex_);
  links_.clear();
  bids_.close();
  data_.close_all();
  entrance_.close();
  claim_.close();
}

void ControlLoop::close(std::uint64_t set) {
  const std::scoped_lock lock(mutex_);
  data_.close(set);
  if (news_.has_ended(set_of(set))) data_.forget_closed(set);
}

bool ControlLoop::has_ended(std::uint64_t set) const {
  const std::scoped_lock lock(mutex_);
  if (news_.has_ended(set)) return true;
  // Of one that ended long ago nothing is known any more, not even that this rank has left it.
  return !news_.is_left_by_some(set) && std::ranges::none_of(own_news_, [&](const Message& news) {
    return news.kind == Message::Kind::kLeft && news.set == set;
  });
}

void ControlLoop::fail(std::uint64_t set, const Error& cause) {
  {
    const std::scoped_lock lock(mutex_);
    if (farewell_ || news_.has_failed(set)) return;  // one that leaves tells nothing more
    own_news_.push_back(Message::failed(rank_, set, cause));
  }
  ::eventfd_write(wake_.get(), 1);
}

void ControlLoop::give_reason(std::string why) {
  const std::scoped_lock lock(mutex_);
  why_ = std::move(why);
}

/// Has news of this rank sent, which is made under the lock.
template <class Make>
void ControlLoop::tell(Make&& make) {
  {
    const std::scoped_lock lock(mutex_);
    own_news_.push_back(make());
  }
  ::eventfd_write(wake_.get(), 1);
}

void ControlLoop::leave(std::uint64_t set, std::uint64_t rounds, int members) {
  tell([&] { return Message::left(rank_, set, rounds, members, why_); });
}

void ControlLoop::tell_wait(std::uint64_t set, std::vector<int> ranks) {
  tell([&] { return Message::waits(rank_, set, {++waits_told_, std::move(ranks)}); });
}

std::uint64_t ControlLoop::ask(int rank) {
  std::uint64_t number = 0;
  tell([&] { return Message::asks(rank_, rank, number = ++asked_); });
  return number;
}

std::uint64_t ControlLoop::probe(int rank) {
  std::uint64_t number = 0;
  tell([&] {
    probes_.insert(number = ++asked_);
    return Message::asks(rank_, rank, number, kProbe);
  });
  return number;
}

void ControlLoop::answer(int rank, std::uint64_t number, std::string text) {
  tell([&] { return Message::answers(rank_, rank, number, std::move(text)); });
}

bool ControlLoop::somebody_waits(std::uint64_t set) const {
  const std::scoped_lock lock(mutex_);
  return news_.waits().any(set);
}

std::vector<int> ControlLoop::ends_of_waits(std::uint64_t set, std::span<const int> ranks) const {
  const std::scoped_lock lock(mutex_);
  return news_.waits().ends(set, ranks);
}

std::vector<Fd> ControlLoop::take(std::uint64_t set, int peer, int width, bool needed) {
  const std::scoped_lock lock(mutex_);
  if (farewell_) throw Error(ErrorKind::kInternal, "the control plane has been stopped");
  auto sockets = data_.take(set, peer, width);
  if (!sockets.empty() || !needed) return sockets;
  if (news_.departed(peer) && !data_.is_connecting(set, peer)) {
    throw Error(ErrorKind::kPeerLost, "no connection to " + label(peer) + ": it has left");
  }
  if (!news_.alive(peer)) return {};
  if (!connects(set, rank_, peer)) {
    if (const auto trouble = entrance_.trouble(Clock::now())) throw *trouble;
  } else if (data_.connect(set, peer, width)) {
    ::eventfd_write(wake_.get(), 1);
  }
  return {};
}

std::vector<int> ControlLoop::descriptors() const {
  const std::scoped_lock lock(mutex_);
  std::vector<int> fds{wake_.get()};
  fds.push_back(launcher_.fd());
  fds.push_back(claim_.fd());
  entrance_.append_descriptors(fds);
  for (const ControlLink& link : links_) fds.push_back(link.fd());
  bids_.append_descriptors(fds);
  data_.append_descriptors(fds);
  std::erase(fds, -1);
  return fds;
}

const std::string& ControlLoop::label(int rank) const { return at(options_.labels, rank); }

}  // namespace torch_ring
