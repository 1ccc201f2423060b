// ControlLoop: the control plane's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "control/entrance.h"
#include "control/graph.h"
#include "control/letters.h"
#include "control/link.h"
#include "control/news.h"
#include "control/options.h"
#include "control/outgoing.h"
#include "control/rank_claim.h"
#include "control/subscriptions.h"
#include "core/clock.h"
#include "core/fd.h"

namespace torch_ring {

/// Ends this process after its launcher has died. A launcher ends its ranks before it ends
/// itself, unless it is killed. Ranks that are left behind would hold their processors and
/// devices until somebody finds them. So they end as a launcher ends them: by SIGTERM, which
/// the program may handle, and by SIGKILL after kPatience.
///
/// Thread: one at a time. Blocking: no.
class LauncherWatch {
 public:
  static constexpr std::chrono::seconds kPatience{30};  // torchrun's

  /// `pidfd`: of the launcher; none: nothing is watched. `text`: the line for stderr.
  LauncherWatch(Fd pidfd, std::string text) : pidfd_(std::move(pidfd)), text_(std::move(text)) {}

  void add_to(PollSet& polls);
  /// When to call look() although nothing is ready.
  Clock::time_point due() const;
  /// Does what is due.
  void look(const PollSet& polls, Clock::time_point now);

  int fd() const noexcept { return pidfd_.get(); }

 private:
  Fd pidfd_;
  const std::string text_;
  std::optional<Clock::time_point> deadline_;  // of this process, whose launcher has died
  std::size_t slot_ = PollSet::kNone;
};

/// For so long a rank that leaves waits for peers that neither read its goodbye nor close: TCP
/// sends a segment that is lost five times again in 6 s, and six times in 13 s.
inline constexpr std::chrono::milliseconds kPartingPatience{10'000};

/// The end of the control connections of a rank that leaves. Sends what the links have queued,
/// ends their sending sides, and drops what still arrives, until the peers have closed theirs:
/// they have read all of it then. A socket that is closed earlier may be reset by what arrives,
/// and take unsent bytes with it. `links` is empty afterwards.
///
/// Blocking: until all peers have closed, `patience` at most.
void part(std::list<ControlLink>& links, std::chrono::milliseconds patience);

/// See ControlPlane. The thread sleeps in poll(), then takes a turn under the lock, then tells the
/// observers without it.
///
/// A loss or a failure is sent on in the turn in which it is heard. Departures wait for kGather
/// in the links' queues, since usually all ranks leave together; what comes after it in a queue
/// takes it along, so the order stays.
class ControlLoop {
 public:
  enum class Farewell { kGoodbye, kNone };

  explicit ControlLoop(ControlOptions options);
  ~ControlLoop() { stop(Farewell::kGoodbye); }

  std::vector<int> missing() const;
  std::string trouble() const;
  void stop(Farewell farewell, std::chrono::milliseconds patience = kPartingPatience);
  Subscriptions& subscriptions() { return subscriptions_; }
  void close(std::uint64_t set);
  void fail(std::uint64_t set, const Error& cause);
  void give_reason(std::string why);
  void leave(std::uint64_t set, std::uint64_t rounds, int members);
  bool has_ended(std::uint64_t set) const;
  void tell_wait(std::uint64_t set, std::vector<int> ranks);
  std::uint64_t ask(int rank);
  std::uint64_t probe(int rank);
  bool has_answered(std::uint64_t probe) const {
    const std::scoped_lock lock(mutex_);
    return !probes_.contains(probe);
  }
  void answer(int rank, std::uint64_t number, std::string text);
  Letters& letters() { return letters_; }
  bool somebody_waits(std::uint64_t set) const;
  std::vector<int> ends_of_waits(std::uint64_t set, std::span<const int> ranks) const;
  const std::string& label(int rank) const;
  std::optional<std::size_t> first_departed(std::span<const int> ranks) const {
    const std::scoped_lock lock(mutex_);
    return news_.first_departed(ranks);
  }
  std::vector<int> lost() const {
    const std::scoped_lock lock(mutex_);
    return news_.lost();
  }
  std::uint64_t connections() const {
    const std::scoped_lock lock(mutex_);
    return data_.taken();
  }
  std::chrono::milliseconds heartbeat_timeout() const { return options_.heartbeat_timeout; }
  std::vector<Fd> take(std::uint64_t set, int peer, int width, bool needed);
  std::vector<int> descriptors() const;

 private:
  template <class Make>
  void tell(Make&& make);
  void run();
  Clock::time_point prepare(PollSet& polls);
  void turn(const PollSet& polls, Clock::time_point slept, Clock::time_point now);

  void leave_mixed(pid_t pid, Clock::time_point now);
  void receive(const PollSet& polls, Clock::time_point now);
  void admit(const PollSet& polls, Clock::time_point now);
  void connect(const PollSet& polls, Clock::time_point now);
  void judge_silence(Clock::time_point slept, Clock::time_point now);
  void send_own_news(Clock::time_point now);
  void seek_neighbours(Clock::time_point now);
  void send(Clock::time_point now);
  std::list<ControlLink> say_goodbye();

  void add_link(int peer, Fd socket, Clock::time_point now);
  ControlLink* link_to(int peer);
  void lose(int peer, const std::string& how, Clock::time_point now);
  void presume_departed(int peer);
  void learn(const Message& message, const ControlLink* from, Clock::time_point now);
  void give_setup_up(const Error& error);
  std::string silence() const;
  bool in_setup() const { return !awaited_.empty(); }
  /// Who is taken for lost itself is heard by nobody, and hears nobody: it judges and seeks no
  /// other rank any more.
  bool judges() const { return news_.alive(rank_); }

  const ControlOptions options_;  // without the listeners
  const int rank_;
  const Fd wake_;
  Subscriptions subscriptions_;
  Letters letters_;

  mutable std::mutex mutex_;  // guards what follows
  News news_;
  Neighbourhood neighbourhood_;
  bool moved_ = true;  // neighbourhood_ has changed
  Entrance entrance_;
  LauncherWatch launcher_;
  RankClaim claim_;
  std::list<ControlLink> links_;
  Bids bids_;
  DataConnections data_;
  std::set<int> awaited_;  // first neighbours without a connection so far
  std::optional<Error> setup_error_;
  std::vector<Message> own_news_;      // what this rank tells and has not sent yet
  std::string why_;                    // this rank leaves
  std::uint64_t waits_told_ = 0;       // by this rank
  std::uint64_t asked_ = 0;            // questions, likewise
  std::set<std::uint64_t> probes_;     // that have no answer, or one of this turn
  std::vector<std::uint64_t> found_;   // probes answered in this turn
  std::vector<Message> untold_;        // for the observers
  std::vector<std::uint64_t> ended_;   // sets, of which they need no news any more
  std::vector<int> presumed_;          // departed ranks, likewise
  std::set<std::uint64_t> connected_;  // sets whose observers are to be told
  std::optional<Farewell> farewell_;
  std::chrono::milliseconds patience_{};  // with peers that do not hear it; as fixed as farewell_
  Clock::time_point next_heartbeat_;

  std::thread thread_;  // the last member: the thread uses all of the above
};

}  // namespace torch_ring
