// SPDX-License-Identifier: Apache-2.0
// ControlPlane: a process's control connections with other ranks, which carry the news of losses,
// departures and failures; and the listeners, which accept data connections when they are needed.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/acceptor.h"
#include "control/graph.h"
#include "control/link.h"
#include "control/news.h"
#include "control/options.h"
#include "control/outgoing.h"
#include "control/queries.h"
#include "control/subscriptions.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"
#include "transport/socket_source.h"
#include "transport/wait_graph.h"

namespace torch_ring {

/// Ends this process after its launcher has died. A launcher ends its ranks before it ends itself,
/// unless it is killed. Orphaned ranks would hold their processors and devices until somebody finds
/// them. So a rank ends as a launcher would end it: by SIGTERM, which the program may handle, and
/// by SIGKILL after kPatience.
///
/// Thread: one at a time. Blocking: no.
class LauncherWatch {
 public:
  static constexpr std::chrono::seconds kPatience{30};  // torchrun's

  /// `pidfd`: of the launcher; none: no watch. `text`: the line for stderr.
  LauncherWatch(Fd pidfd, std::string text) : pidfd_(std::move(pidfd)), text_(std::move(text)) {}

  void add_to(PollSet& polls);
  /// The time to call check() although nothing is ready.
  Clock::time_point due() const;
  /// Sends the signals that are due.
  void check(const PollSet& polls, Clock::time_point now);

  int fd() const noexcept { return pidfd_.get(); }

 private:
  Fd pidfd_;
  const std::string text_;
  std::optional<Clock::time_point> deadline_;  // of this process after its launcher's death
  std::size_t slot_ = PollSet::kNone;
};

/// How long a leaving rank waits for peers that neither read its goodbye nor close: TCP resends a
/// lost segment five times in 6 s, and six times in 13 s.
inline constexpr std::chrono::milliseconds kGoodbyePatience{10'000};

/// Ends the control connections of a leaving rank. Sends the queued bytes of the links, ends their
/// sending sides, and drops incoming bytes until the peers have closed theirs: then they have read
/// everything. If a socket is closed earlier, incoming bytes may reset it and unsent bytes are
/// lost. `links` is empty afterwards.
///
/// Blocking: until all peers have closed, `patience` at most.
void finish_goodbyes(std::list<ControlLink>& links, std::chrono::milliseconds patience);

/// One per process, for all of its process sets. It has one thread, which sleeps in poll(); a world
/// of one rank has none.
///
/// The ranks form a Chord ring (I. Stoica et al., "Chord: a scalable peer-to-peer lookup service",
/// SIGCOMM 2001) in the order of hosts: each has connections to the ranks at distances 1, 2, 4, ...
/// in both directions, 2 log2(n) of them at most. News is flooded through it: each rank passes on
/// each message once, when it first hears it. When a rank is lost, its neighbours on the ring
/// connect to the next living ones and tell them all that they know, so the survivors stay
/// connected and miss no news. A connection that the network resets is made again.
///
/// The thread sleeps in poll(), then takes a turn under the lock, then notifies the observers
/// without it. News of a loss or a failure is sent on in the turn in which it arrives. Departures
/// wait for kGather in the links' queues, since usually all ranks leave together; a later message
/// in a queue takes them along, so the order stays.
///
/// fork() waits until no plane takes a turn, so that the child knows all descriptors.
///
/// Thread: any, but stop() and die() one at a time. Blocking: stop() and die(); subscribe() and
/// unsubscribe(), while an observer is called.
class ControlPlane {
 public:
  using Address = torch_ring::Address;
  using Options = ControlOptions;

  /// Starts the thread, which begins to connect to the neighbours. Errors: Error(kInvalidArgument)
  /// if the options do not fit together.
  explicit ControlPlane(Options options);
  ~ControlPlane() { stop(); }
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  /// The neighbours to which there is no connection yet; empty when the plane is complete.
  /// Errors, until then: Error(kPeerLost) if a rank has exited, Error(kMismatch) if one has another
  /// key, Error(kInternal) if this process lacks descriptors.
  std::vector<int> missing() const;

  /// The reason why it cannot accept connections, or why the last attempt to connect to a neighbour
  /// failed, for the message of a timeout; empty if there is none.
  std::string trouble() const;

  /// Tells the other ranks that this one leaves a set in peace, after it has completed `rounds`
  /// rounds of the set's board. Call it before the set's data connections close. When all of its
  /// `members` have left, the set has ended: nobody uses the memory of its slots any more. `why`:
  /// the reason for the other ranks' errors, "ValueError: ... at train.py:41"; without one they
  /// read which rank this one knows to be lost. Blocking: no.
  void leave(std::uint64_t set, std::uint64_t rounds, int members, std::string why = {});
  bool has_ended(std::uint64_t set) const;

  /// The ranks that, as far as this one knows, have died or were silent for too long.
  std::vector<int> lost() const {
    const std::scoped_lock lock(mutex_);
    return news_.lost();
  }

  /// The key of the world. Thread: any.
  const Key& key() const noexcept { return options_.key; }

  /// The cipher of connections between hosts, "AES-128-GCM"; empty: this rank has no control
  /// connection with TLS.
  std::string cipher() const;

  /// The number of data connections that SocketSources of this rank have taken so far.
  std::uint64_t connections() const {
    const std::scoped_lock lock(mutex_);
    return data_.taken();
  }

  /// Says goodbye, waits until the neighbours have heard it (`patience` at most), joins the thread
  /// and closes all connections, including those that no SocketSource has taken. `why`: as in
  /// leave(), for the sets that this rank has not used.
  void stop(std::chrono::milliseconds patience = kGoodbyePatience, std::string why = {}) {
    end(Farewell::kGoodbye, patience, std::move(why));
  }

  /// Like stop(), but without a goodbye: the other ranks presume this one dead.
  void die() { end(Farewell::kNone, kGoodbyePatience, {}); }

  /// Tells `observer` of the ranks `members`, until unsubscribe() returns. Earlier news arrives at
  /// once. `set`: the set's number, the same on all ranks, never used twice; or the number of its
  /// messages (kMessagesUp), whose observer hears of the set's ranks, too.
  void subscribe(std::uint64_t set, std::vector<int> members, ControlObserver& observer);
  /// Also closes the set's data connections that no SocketSource has taken, and refuses later ones.
  void unsubscribe(std::uint64_t set);

  /// Tells the other ranks that this one has given up a set, unless it knows that another rank has,
  /// because that news is on its way already. Blocking: no.
  void fail(std::uint64_t set, const Error& cause);

  /// The data sockets of a set: `width` to each peer. `members`: its ranks in the world, by their
  /// rank in the set. The plane must outlive it. Its take() also throws the Error of the handshake,
  /// and Error(kInternal) after stop().
  std::unique_ptr<SocketSource> sockets(std::uint64_t set, std::vector<int> members, int width);

  /// The wait-for graph of a set, with its ranks by their rank in the set; `patience` is its own.
  /// The plane must outlive it.
  std::unique_ptr<WaitGraph> waits(std::uint64_t set, std::vector<int> members,
                                   std::chrono::milliseconds patience);

  /// Asks a rank of the world for its present operations. Returns the question's number. Blocking:
  /// no.
  std::uint64_t ask(int rank);
  /// Answers a rank's question with the first Message::kTextBytes of `text`. Blocking: no.
  void answer(int rank, std::uint64_t number, std::string text);
  /// Asks a rank of the world for a sign of life. When it has answered, the observers have heard
  /// all news that it sent or passed on before. Returns the question's number, which is not 0.
  /// Blocking: no.
  std::uint64_t probe(int rank);
  bool has_answered(std::uint64_t probe) const {
    const std::scoped_lock lock(mutex_);
    return !probes_.contains(probe);
  }
  /// `reader` gets the questions and answers for this rank, one at a time, until stop(). An answer
  /// may never arrive: the rank is lost or has no reader, or the message was lost with a rank on
  /// the way.
  void read_queries(Queries::Reader reader) { queries_.read_by(std::move(reader)); }

  /// Stops all ranks at one point of their programs, because this one has got `signal`: at the
  /// first point that no rank had passed when it heard of the signal. Blocking: no.
  void want_stop(const std::string& signal);
  /// Passes a point at which the program may stop; the ranks must have the same number of them.
  /// Returns whether all ranks stop here; nullopt, without passing it, while the ranks agree: their
  /// control threads answer, even while their programs compute. Errors: Error(kPeerLost) if a rank
  /// was lost meanwhile. Blocking: no.
  std::optional<bool> pass_point();
  /// The reason why the ranks stop: "rank 2 (pid 7) got SIGTERM"; empty while no rank wants to
  /// stop.
  std::string why_stop() const;

  /// The plane's descriptors. A forked child closes them, or no peer would notice this process's
  /// death while the child lives; it must neither use nor destroy the plane.
  std::vector<int> descriptors() const {
    const std::scoped_lock lock(mutex_);
    return open_descriptors();
  }

 private:
  enum class Farewell { kGoodbye, kNone };
  class Planes;
  class Sockets;
  class Waits;

  /// Has fork() lock a plane.
  class ForkGuard {
   public:
    explicit ForkGuard(ControlPlane& plane);
    ~ForkGuard();
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;

   private:
    ControlPlane& plane_;
  };

  std::vector<int> open_descriptors() const;
  void end(Farewell farewell, std::chrono::milliseconds patience, std::string why);
  std::string reason(std::string why) const;
  /// SocketSource::take() for a peer of a set.
  std::vector<Socket> take(std::uint64_t set, int peer, int width, bool needed);
  /// Sends news of this rank, which make() builds under the lock.
  template <class Make>
  void tell(Make&& make);
  void run();
  Clock::time_point prepare(PollSet& polls);
  void turn(const PollSet& polls, Clock::time_point slept, Clock::time_point now);

  void receive(const PollSet& polls, Clock::time_point now);
  void admit(const PollSet& polls, Clock::time_point now);
  void leave_mixed(pid_t rival, Clock::time_point now);
  void connect(const PollSet& polls, Clock::time_point now);
  void judge_silence(Clock::time_point slept, Clock::time_point now);
  void send_own_news(Clock::time_point now);
  void seek_neighbours(Clock::time_point now);
  void send(Clock::time_point now);
  std::list<ControlLink> say_goodbye();

  void add_link(int peer, Socket socket, Clock::time_point now);
  void forget_probes(std::uint64_t answered);
  ControlLink* link_to(int peer);
  void lose(int peer, const std::string& how, Clock::time_point now);
  void presume_departed(int peer);
  void learn(const Message& message, const ControlLink* from, Clock::time_point now);
  void give_setup_up(const Error& error);
  void tell_points(const std::string& signal);
  std::string silence() const;
  bool in_setup() const { return !awaited_.empty(); }
  /// A rank that is itself presumed lost hears no other rank, and none hears it: it neither judges
  /// nor seeks others any more.
  bool judges() const { return news_.alive(rank_); }

  const Options options_;  // without the listeners
  const int rank_;
  const Fd wake_;
  Subscriptions subscriptions_;
  Queries queries_;

  mutable std::mutex mutex_;  // guards the members below
  News news_;
  Neighbourhood neighbourhood_;
  bool moved_ = true;  // neighbourhood_ has changed
  Acceptor acceptor_;
  LauncherWatch launcher_;
  std::list<ControlLink> links_;
  DialRequests dials_;
  DataConnections data_;
  std::set<int> awaited_;  // first neighbours without a connection so far
  std::optional<Error> setup_error_;
  std::vector<Message> own_news_;      // news of this rank, not sent yet
  std::uint64_t points_ = 0;           // passed by this rank
  std::optional<std::uint64_t> stop_;  // the point after which all ranks stop
  bool told_points_ = false;           // to the others; it passes no more until all have
  std::uint64_t waits_told_ = 0;       // by this rank
  std::uint64_t asked_ = 0;            // questions, likewise
  // The ranks asked, by question: probes without an answer, or with one of this turn.
  std::map<std::uint64_t, int> probes_;
  std::vector<std::uint64_t> found_;   // probes answered in this turn
  std::vector<Message> pending_news_;  // for the observers
  std::vector<std::uint64_t> ended_;   // sets, whose news they need no more
  std::vector<int> presumed_;          // departed ranks, likewise
  std::set<std::uint64_t> connected_;  // sets whose observers must be notified
  std::optional<Farewell> farewell_;
  std::chrono::milliseconds patience_{};  // with peers that do not read the goodbye
  std::string why_;                       // the reason in the goodbye
  Clock::time_point next_heartbeat_;
  const Clock::time_point began_ = Clock::now();

  ForkGuard fork_guard_{*this};
  std::thread thread_;  // the last member: the thread uses all of the above
};

}  // namespace torch_ring
