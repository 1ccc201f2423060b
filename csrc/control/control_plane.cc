// SPDX-License-Identifier: Apache-2.0
#include "control/control_plane.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "core/at.h"
#include "core/failpoint.h"

namespace torch_ring {

void LauncherWatch::add_to(PollSet& polls) {
  slot_ = pidfd_ ? polls.add(pidfd_.get(), POLLIN) : PollSet::kNone;
}

Clock::time_point LauncherWatch::due() const {
  return deadline_.value_or(Clock::time_point::max());
}

void LauncherWatch::check(const PollSet& polls, Clock::time_point now) {
  if (deadline_ && now >= *deadline_) ::kill(::getpid(), SIGKILL);
  if (!polls.ready(slot_)) return;
  pidfd_.reset();
  deadline_ = now + kPatience;
  const std::string line = text_ + '\n';
  // If this fails, the line is lost.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  ::kill(::getpid(), SIGTERM);
}

void finish_goodbyes(std::list<ControlLink>& links, std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  while (true) {
    PollSet polls;
    const auto now = Clock::now();
    links.remove_if([&](ControlLink& link) {
      link.flush(now);
      if (!link.pending()) link.end_sending();
      link.drain();
      if (link.ended()) return true;
      link.add_to(polls);
      return false;
    });
    if (links.empty() || now >= deadline) break;
    polls.wait(deadline);
  }
  links.clear();
}

/// The planes of this process. fork() locks them; then a child closes their descriptors.
class ControlPlane::Planes {
 public:
  /// Never destroyed: a thread may fork while the process exits.
  static Planes& instance() {
    static Planes* const planes = [] {
      auto* const made = new Planes;
      ::pthread_atfork([] { instance().lock(); }, [] { instance().unlock(); },
                       [] { instance().close_in_child(); });
      return made;
    }();
    return *planes;
  }

  void add(ControlPlane& plane) {
    const std::scoped_lock lock(mutex_);
    planes_.push_back(&plane);
  }
  void remove(const ControlPlane& plane) {
    const std::scoped_lock lock(mutex_);
    std::erase(planes_, &plane);
  }

 private:
  void lock() {
    mutex_.lock();
    for (ControlPlane* const plane : planes_) plane->mutex_.lock();
  }
  void unlock() {
    for (ControlPlane* const plane : planes_) plane->mutex_.unlock();
    mutex_.unlock();
  }
  void close_in_child() {
    for (const ControlPlane* const plane : planes_) {
      for (const int fd : plane->open_descriptors()) ::close(fd);
    }
    unlock();
    planes_.clear();  // these numbers may soon mean other files, which a child of the child keeps
  }

  std::mutex mutex_;
  std::vector<ControlPlane*> planes_;
};

ControlPlane::ForkGuard::ForkGuard(ControlPlane& plane) : plane_(plane) {
  Planes::instance().add(plane_);
}
ControlPlane::ForkGuard::~ForkGuard() { Planes::instance().remove(plane_); }

ControlPlane::ControlPlane(Options options)
    : options_((check(options), Options{options.rank,
                                        std::move(options.host_of),
                                        std::move(options.labels),
                                        std::move(options.addresses),
                                        options.key,
                                        options.tls,
                                        {},
                                        {},
                                        options.heartbeat_timeout,
                                        {},
                                        {}})),
      rank_(options_.rank),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      subscriptions_(rank_, options_.labels),
      news_(options_.size()),
      neighbourhood_(rank_, options_.host_of),
      acceptor_(static_cast<std::uint32_t>(rank_), options_.key, std::move(options.unix_listener),
                std::move(options.tcp_listeners), options_.tls),
      launcher_(std::move(options.launcher), std::move(options.launcher_died)),
      dials_(options_),
      data_(options_),
      next_heartbeat_(Clock::now()) {
  if (!wake_) throw_errno("eventfd");
  for (const int peer : neighbourhood_.neighbours()) awaited_.insert(peer);
  if (options_.size() > 1) thread_ = std::thread([this] { run(); });
}

std::vector<int> ControlPlane::missing() const {
  const std::scoped_lock lock(mutex_);
  if (setup_error_) throw *setup_error_;
  return {awaited_.begin(), awaited_.end()};
}

std::string ControlPlane::trouble() const {
  const std::scoped_lock lock(mutex_);
  const auto trouble = acceptor_.trouble(Clock::now());
  return trouble ? trouble->what() : dials_.trouble();
}

void ControlPlane::end(Farewell farewell, std::chrono::milliseconds patience, std::string why) {
  {
    const std::scoped_lock lock(mutex_);
    if (!farewell_) {
      farewell_ = farewell;
      patience_ = patience;
      why_ = std::move(why);
    }
  }
  ::eventfd_write(wake_.get(), 1);
  queries_.close();
  if (thread_.joinable()) thread_.join();
  const std::scoped_lock lock(mutex_);
  links_.clear();
  dials_.close();
  data_.close_all();
  acceptor_.close();
}

class ControlPlane::Sockets : public SocketSource {
 public:
  Sockets(ControlPlane& plane, std::uint64_t set, std::vector<int> members, int width)
      : plane_(plane), set_(set), members_(std::move(members)), width_(width) {}

  std::vector<Socket> take(int peer, bool needed) override {
    return plane_.take(set_, at(members_, peer), width_, needed);
  }
  std::string trouble(int peer) const override {
    const std::scoped_lock lock(plane_.mutex_);
    return plane_.data_.trouble(set_, at(members_, peer));
  }

 private:
  ControlPlane& plane_;
  const std::uint64_t set_;
  const std::vector<int> members_;
  const int width_;
};

class ControlPlane::Waits : public WaitGraph {
 public:
  Waits(ControlPlane& plane, std::uint64_t set, std::vector<int> members,
        std::chrono::milliseconds patience)
      : plane_(plane), set_(set), members_(std::move(members)), patience_(patience) {}

  std::chrono::milliseconds patience() const override { return patience_; }
  void tell(std::span<const int> ranks) override {
    plane_.tell([&] {
      return Message::waits(plane_.rank_, set_, {++plane_.waits_told_, in_world(ranks)});
    });
  }
  void ask(std::span<const int> ranks) override {
    for (const int rank : in_world(ranks)) plane_.ask(rank);
  }
  bool is_notified() const override {
    const std::scoped_lock lock(plane_.mutex_);
    return plane_.news_.waits().any(set_);
  }
  const std::string& label(int rank) const override {
    return at(plane_.options_.labels, at(members_, rank));
  }
  std::optional<int> departed(std::span<const int> ranks) const override {
    const std::scoped_lock lock(plane_.mutex_);
    const std::optional<std::size_t> place = plane_.news_.first_departed(in_world(ranks));
    return place ? std::optional(ranks[*place]) : std::nullopt;
  }
  std::chrono::milliseconds patience_with_departed() const override {
    return plane_.options_.heartbeat_timeout;
  }

  std::vector<int> ends(std::span<const int> ranks) const override {
    std::vector<int> ends;
    const std::scoped_lock lock(plane_.mutex_);
    for (const int rank : plane_.news_.waits().ends(set_, in_world(ranks))) {
      const auto member = std::ranges::find(members_, rank);
      if (member != members_.end()) ends.push_back(static_cast<int>(member - members_.begin()));
    }
    return ends;
  }

 private:
  std::vector<int> in_world(std::span<const int> ranks) const {
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(at(members_, rank));
    return members;
  }

  ControlPlane& plane_;
  const std::uint64_t set_;
  const std::vector<int> members_;
  const std::chrono::milliseconds patience_;
};

void ControlPlane::subscribe(std::uint64_t set, std::vector<int> members,
                             ControlObserver& observer) {
  subscriptions_.add(set, std::move(members), observer);
}

void ControlPlane::unsubscribe(std::uint64_t set) {
  subscriptions_.remove(set);
  const std::scoped_lock lock(mutex_);
  data_.close(set);
}

std::unique_ptr<SocketSource> ControlPlane::sockets(std::uint64_t set, std::vector<int> members,
                                                    int width) {
  return std::make_unique<Sockets>(*this, set, std::move(members), width);
}

std::unique_ptr<WaitGraph> ControlPlane::waits(std::uint64_t set, std::vector<int> members,
                                               std::chrono::milliseconds patience) {
  return std::make_unique<Waits>(*this, set, std::move(members), patience);
}

bool ControlPlane::has_ended(std::uint64_t set) const {
  const std::scoped_lock lock(mutex_);
  return news_.has_ended(set);
}

void ControlPlane::fail(std::uint64_t set, const Error& cause) {
  {
    const std::scoped_lock lock(mutex_);
    if (farewell_ || news_.has_failed(set)) return;  // a leaving rank tells nothing more
    own_news_.push_back(Message::failed(rank_, set, cause));
  }
  ::eventfd_write(wake_.get(), 1);
}

template <class Make>
void ControlPlane::tell(Make&& make) {
  {
    const std::scoped_lock lock(mutex_);
    own_news_.push_back(make());
  }
  ::eventfd_write(wake_.get(), 1);
}

void ControlPlane::leave(std::uint64_t set, std::uint64_t rounds, int members, std::string why) {
  tell([&] { return Message::left(rank_, set, rounds, members, reason(std::move(why))); });
}

/// The reason to leave: `why`, or else the loss that this rank knows.
std::string ControlPlane::reason(std::string why) const {
  const Message* const loss = why.empty() ? news_.first_loss_besides(rank_) : nullptr;
  if (loss == nullptr) return why;
  return "it knows that " + at(options_.labels, loss->rank) + ' ' + loss->text;
}

std::uint64_t ControlPlane::ask(int rank) {
  std::uint64_t number = 0;
  tell([&] { return Message::asks(rank_, rank, number = ++asked_); });
  return number;
}

std::uint64_t ControlPlane::probe(int rank) {
  std::uint64_t number = 0;
  tell([&] {
    probes_.emplace(number = ++asked_, rank);
    return Message::asks(rank_, rank, number, kProbe);
  });
  return number;
}

void ControlPlane::answer(int rank, std::uint64_t number, std::string text) {
  tell([&] { return Message::answers(rank_, rank, number, std::move(text)); });
}

void ControlPlane::want_stop(const std::string& signal) {
  {
    const std::scoped_lock lock(mutex_);
    tell_points(signal);
  }
  ::eventfd_write(wake_.get(), 1);
}

void ControlPlane::tell_points(const std::string& signal) {
  if (std::exchange(told_points_, true)) return;
  own_news_.push_back(Message::stops(rank_, points_, signal));
}

std::optional<bool> ControlPlane::pass_point() {
  const std::scoped_lock lock(mutex_);
  if (!told_points_) {
    ++points_;
    return false;
  }
  const auto lost = news_.lost();
  if (!stop_ && lost.empty()) stop_ = news_.furthest_point();
  if (stop_) return points_++ >= *stop_;
  if (lost.empty()) return std::nullopt;
  throw Error(ErrorKind::kPeerLost,
              at(options_.labels, lost.front()) + " was lost while the ranks agreed where to stop");
}

std::string ControlPlane::why_stop() const {
  const std::scoped_lock lock(mutex_);
  const Message* const first = news_.first_signal();
  return first == nullptr ? "" : at(options_.labels, first->rank) + " got " + first->text;
}

std::vector<Socket> ControlPlane::take(std::uint64_t set, int peer, int width, bool needed) {
  const std::scoped_lock lock(mutex_);
  if (farewell_) throw Error(ErrorKind::kInternal, "the control plane has been stopped");
  auto sockets = data_.take(set, peer, width);
  if (!sockets.empty() || !needed) return sockets;
  if (news_.departed(peer) && !data_.is_connecting(set, peer)) {
    throw Error(ErrorKind::kPeerLost,
                "no connection to " + at(options_.labels, peer) + ": it has left");
  }
  if (!news_.alive(peer)) return {};
  if (!connects(set, rank_, peer)) {
    if (const auto trouble = acceptor_.trouble(Clock::now())) throw *trouble;
  } else if (data_.connect(set, peer, width)) {
    ::eventfd_write(wake_.get(), 1);
  }
  return {};
}

std::string ControlPlane::cipher() const {
  const std::scoped_lock lock(mutex_);
  const auto encrypted = std::ranges::find_if(links_, &ControlLink::tls);
  return encrypted == links_.end() ? "" : encrypted->tls()->cipher();
}

std::vector<int> ControlPlane::open_descriptors() const {
  std::vector<int> fds{wake_.get()};
  fds.push_back(launcher_.fd());
  acceptor_.append_descriptors(fds);
  for (const ControlLink& link : links_) fds.push_back(link.fd());
  dials_.append_descriptors(fds);
  data_.append_descriptors(fds);
  std::erase(fds, -1);
  return fds;
}

namespace {

constexpr std::chrono::milliseconds kGather{10};  // departures wait so long for others
// A world that is so young may have ranks of two jobs.
constexpr std::chrono::seconds kMayHaveMixed{60};

}  // namespace

void ControlPlane::run() {
  while (true) {
    PollSet polls;
    std::unique_lock lock(mutex_);
    const auto due = prepare(polls);
    lock.unlock();

    const auto slept = Clock::now();
    polls.wait(due);

    lock.lock();
    turn(polls, slept, Clock::now());
    const auto pending = std::exchange(pending_news_, {});
    const auto ended = std::exchange(ended_, {});
    const auto presumed = std::exchange(presumed_, {});
    const auto connected = std::exchange(connected_, {});
    const auto found = std::exchange(found_, {});
    const auto farewell = farewell_;
    std::list<ControlLink> leaving;
    if (farewell == Farewell::kGoodbye) leaving = say_goodbye();
    lock.unlock();

    for (const Message& news : pending) subscriptions_.tell(news);
    for (const std::uint64_t set : ended) subscriptions_.forget(set);
    for (const int rank : presumed) subscriptions_.tell_presumed(rank);
    for (const std::uint64_t set : connected) subscriptions_.tell_connected(set);
    if (!found.empty()) {  // all their earlier messages have been passed on
      lock.lock();
      for (const std::uint64_t probe : found) forget_probes(probe);
      lock.unlock();
    }
    if (!farewell) continue;
    finish_goodbyes(leaving, patience_);
    return;
  }
}

/// Fills the set of descriptors; returns when the next turn is due at the latest.
Clock::time_point ControlPlane::prepare(PollSet& polls) {
  polls.add(wake_.get(), POLLIN);
  launcher_.add_to(polls);
  acceptor_.add_to(polls, Clock::now());
  dials_.add_to(polls);
  data_.add_to(polls);
  auto due = std::min({next_heartbeat_, launcher_.due(), neighbourhood_.next_change(),
                       acceptor_.due(), dials_.due(in_setup()), data_.due()});
  for (ControlLink& link : links_) {
    link.add_to(polls);
    due = std::min(due, link.due());
    if (judges() && news_.alive(link.peer())) {
      due = std::min(due, link.heard() + options_.heartbeat_timeout);
    }
  }
  return due;
}

/// `slept`: the time when the thread went to sleep: data that had arrived by then is received now.
void ControlPlane::turn(const PollSet& polls, Clock::time_point slept, Clock::time_point now) {
  eventfd_t rings = 0;
  ::eventfd_read(wake_.get(), &rings);
  launcher_.check(polls, now);
  receive(polls, now);
  admit(polls, now);
  connect(polls, now);
  judge_silence(slept, now);
  send_own_news(now);
  seek_neighbours(now);
  send(now);
}

void ControlPlane::receive(const PollSet& polls, Clock::time_point now) {
  for (ControlLink& link : links_) {
    if (!link.ready(polls) || failpoint("control.receive", rank_)) continue;
    try {
      for (const Message& message : link.receive(now)) {
        // A rank that was presumed lost and goes on presumes that the ranks that dropped it are
        // lost.
        const bool revenge = message.kind == Message::Kind::kLost && news_.lost(link.peer());
        if (!revenge) learn(message, &link, now);
      }
    } catch (const Error& error) {
      link.close();
      lose(link.peer(), error.what(), now);
    }
    if (!link.ended()) continue;
    const int peer = link.peer();
    const bool same_host = at(options_.host_of, peer) == at(options_.host_of, rank_);
    if (!link.was_reset() || same_host) {
      lose(peer, "died: its connection closed; see its output", now);
    } else if (news_.alive(peer) && judges()) {
      dials_.renew(peer, now);
    }
  }
}

/// Ends this world, which may have ranks of two jobs: another process has come as the same rank.
void ControlPlane::leave_mixed(pid_t rival, Clock::time_point now) {
  const std::string why =
      "may be in the wrong job: process " + std::to_string(rival) +
      " has come as the same rank. Two jobs of one name may have mixed: give each its own "
      "MASTER_PORT, with MASTER_ADDR=127.0.0.1 if its ranks are on one host";
  if (in_setup())
    give_setup_up(Error(ErrorKind::kPeerLost, at(options_.labels, rank_) + ' ' + why));
  learn(Message::departed(rank_, "it " + why), nullptr, now);
  pending_news_.push_back(Message::lost(rank_, rank_, why));  // for this rank's own sets
}

void ControlPlane::admit(const PollSet& polls, Clock::time_point now) {
  for (auto& [hello, socket, unix] : acceptor_.admit(polls, now)) {
    // The handshake has proved that the peer knows the key, and that it means this rank.
    const auto peer = static_cast<int>(hello.from);
    if (hello.from >= options_.host_of.size() || !connects(hello.set, peer, rank_)) continue;
    // A rank of this host comes over the Unix socket, as a process of this user, so that a stranger
    // who can read the key cannot pass for it.
    if (unix != (at(options_.host_of, peer) == at(options_.host_of, rank_))) continue;
    if (hello.channel == Hello::kControl) {
      add_link(peer, std::move(socket), now);
    } else if (data_.accept(hello, std::move(socket))) {
      connected_.insert(hello.set);
    }
  }
  const std::optional<pid_t> rival = acceptor_.take_rival();
  if (rival && now < began_ + kMayHaveMixed) leave_mixed(*rival, now);
  if (!in_setup()) return;
  if (const auto trouble = acceptor_.trouble(now)) give_setup_up(*trouble);
}

void ControlPlane::connect(const PollSet& polls, Clock::time_point now) {
  auto outcome = dials_.advance(polls, now, in_setup());
  for (auto& [peer, socket] : outcome.connected) add_link(peer, std::move(socket), now);
  if (outcome.error && in_setup()) {
    const auto& [peer, error] = *outcome.error;
    give_setup_up(
        Error(error.kind(), "no connection to " + at(options_.labels, peer) + ": " + error.what()));
  }
  for (const int peer : outcome.refused) {
    if (in_setup()) {
      give_setup_up(Error(ErrorKind::kPeerLost, at(options_.labels, peer) +
                                                    " has exited during init: nobody "
                                                    "listens at its address any more"));
    } else if (neighbourhood_.behind_departed(peer)) {
      presume_departed(peer);
    } else {
      lose(peer, "died: nobody listens at its address any more; see its output", now);
    }
  }
  for (const int peer : outcome.gone) {
    lose(peer,
         "died: its connection closed, and nobody listens at its address any more; see its output, "
         "or whether a firewall rejects its connections",
         now);
  }
  for (const int peer : outcome.silent) lose(peer, silence(), now);
  for (const std::uint64_t set : data_.advance(polls, now)) connected_.insert(set);
}

void ControlPlane::judge_silence(Clock::time_point slept, Clock::time_point now) {
  for (ControlLink& link : links_) {
    if (link.overflown()) {
      link.close();
      lose(link.peer(), "does not read its control connection: it is stopped", now);
    } else if (slept - link.heard() > options_.heartbeat_timeout) {
      lose(link.peer(), silence(), now);
    }
  }
  // No turn takes so long: this process itself was stopped.
  if (now - slept > options_.heartbeat_timeout / 2) dials_.excuse(now);
}

void ControlPlane::send_own_news(Clock::time_point now) {
  for (const Message& news : std::exchange(own_news_, {})) {
    const bool failure = news.kind == Message::Kind::kFailed;
    if (!failure || !news_.has_failed(news.set)) learn(news, nullptr, now);
  }
}

/// DialRequests for connections to the neighbours that this rank lacks.
void ControlPlane::seek_neighbours(Clock::time_point now) {
  if (now >= neighbourhood_.next_change()) {
    neighbourhood_.settle(now);
    moved_ = true;
  }
  if (!std::exchange(moved_, false) || !judges()) return;
  for (const int peer : neighbourhood_.neighbours()) {
    if (news_.alive(peer) && !link_to(peer)) dials_.add(peer, now, in_setup());
  }
}

void ControlPlane::send(Clock::time_point now) {
  if (now >= next_heartbeat_) {
    next_heartbeat_ = now + options_.heartbeat_timeout / 4;
    for (ControlLink& link : links_) {
      if (news_.alive(link.peer())) link.queue(Message::heartbeat(rank_), now);
    }
  }
  for (ControlLink& link : links_) link.flush(now);
  links_.remove_if([](const ControlLink& link) { return link.ended(); });
}

/// Takes all links, with this rank's departure in their queues, except those to lost ranks.
std::list<ControlLink> ControlPlane::say_goodbye() {
  if (failpoint("departure", rank_)) return {};
  const auto now = Clock::now();
  const Message goodbye = Message::departed(rank_, reason(why_));
  links_.remove_if([&](const ControlLink& link) { return news_.lost(link.peer()); });
  for (ControlLink& link : links_) {
    link.queue(goodbye, now);
    link.flush(now);
  }
  if (failpoint("departed", rank_)) return {};
  return std::exchange(links_, {});
}

void ControlPlane::add_link(int peer, Socket socket, Clock::time_point now) {
  if (!news_.alive(peer)) return;
  // A peer that connects again has given up its former connection.
  links_.remove_if([&](const ControlLink& link) { return link.peer() == peer; });
  ControlLink& link = links_.emplace_back(peer, std::move(socket), options_.size(), now);
  for (const Message& news : news_.known()) link.queue(news, now);
  const auto asks = [&](const auto& probe) { return probe.second == peer; };
  if (std::ranges::any_of(probes_, asks)) {  // the former connection may have lost them
    probes_.emplace(++asked_, peer);
    own_news_.push_back(Message::asks(rank_, peer, asked_, kProbe));
  }
  dials_.remove(peer);
  awaited_.erase(peer);
}

/// Forgets a probe that its rank has answered, and earlier ones of that rank.
void ControlPlane::forget_probes(std::uint64_t answered) {
  const auto found = probes_.find(answered);
  if (found == probes_.end()) return;
  std::erase_if(probes_, [&, rank = found->second](const auto& probe) {
    return probe.second == rank && probe.first <= answered;
  });
}

ControlLink* ControlPlane::link_to(int peer) {
  const auto found = std::ranges::find(links_, peer, &ControlLink::peer);
  return found == links_.end() ? nullptr : &*found;
}

/// Handles the loss of `peer`, which this rank has noticed.
void ControlPlane::lose(int peer, const std::string& how, Clock::time_point now) {
  if (news_.alive(peer) && judges()) learn(Message::lost(peer, rank_, how), nullptr, now);
}

/// Presumes that `peer` has departed: all ranks between this one and `peer` have left, and nobody
/// listens there now, so the news of its departure was lost with them. If it has died after all,
/// other ranks will report that.
void ControlPlane::presume_departed(int peer) {
  news_.presume_departed(peer);
  presumed_.push_back(peer);
  neighbourhood_.vacate(peer);
  moved_ = true;
  dials_.remove(peer);
  data_.forget(peer);
}

void ControlPlane::learn(const Message& message, const ControlLink* from, Clock::time_point now) {
  if (!news_.learn(message)) return;
  const bool departed = message.kind == Message::Kind::kDeparted;
  const bool lost = message.kind == Message::Kind::kLost;
  const bool left = message.kind == Message::Kind::kLeft;
  const bool own_left = left && message.rank == rank_;
  if (left && news_.has_ended(message.set)) {
    ended_.push_back(message.set);
    for (const std::uint64_t number : numbers_of(message.set)) {
      data_.close(number);  // this rank may have announced its leaving, but not closed the set yet
    }
  }
  const bool asks = message.kind == Message::Kind::kAsks;
  if (asks || message.kind == Message::Kind::kAnswers) {
    if (message.recipient() != rank_) {
      // A message on its way to another rank.
    } else if (asks && message.text == kProbe) {
      own_news_.push_back(Message::answers(rank_, message.rank, message.set, {}));
    } else if (!asks && probes_.contains(message.set)) {
      found_.push_back(message.set);
    } else {
      queries_.put({asks, message.rank, message.set, message.text});
    }
  } else if (message.kind == Message::Kind::kStops) {
    tell_points({});
  } else if (message.kind != Message::Kind::kWaits && !own_left) {
    pending_news_.push_back(message);
  }
  if ((departed || lost) && message.rank != rank_) {
    if (departed) {
      neighbourhood_.depart(message.rank, now);
    } else {
      neighbourhood_.lose(message.rank);
      moved_ = true;
    }
    dials_.remove(message.rank);
    data_.forget(message.rank);
  }
  if (!judges()) dials_.close();
  if (in_setup() && lost) {
    give_setup_up(Error(ErrorKind::kPeerLost, subscriptions_.describe(message)));
  } else if (departed && awaited_.contains(message.rank)) {
    give_setup_up(
        Error(ErrorKind::kPeerLost, at(options_.labels, message.rank) + " has exited during init"));
  }
  for (ControlLink& link : links_) {
    if (&link != from && !news_.departed(link.peer())) {
      link.queue(message, departed || left ? now + kGather : now);
    }
  }
}

void ControlPlane::give_setup_up(const Error& error) {
  if (setup_error_) return;
  // All ranks are notified of a lack of this process.
  const bool own = error.kind() == ErrorKind::kInternal;
  const std::string who = own ? "rank " + std::to_string(rank_) + ": " : "";
  setup_error_ = Error(error.kind(), who + error.what());
}

std::string ControlPlane::silence() const {
  return "has not been heard for " + in_seconds(options_.heartbeat_timeout) +
         " (TORCH_RING_HEARTBEAT_TIMEOUT): it is stopped, or its host is cut off";
}

}  // namespace torch_ring
