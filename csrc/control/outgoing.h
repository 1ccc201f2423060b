// SPDX-License-Identifier: Apache-2.0
// Outgoing: a connection to another rank that is being made.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/link.h"
#include "control/news.h"
#include "control/options.h"
#include "core/clock.h"
#include "core/fd.h"
#include "transport/authentication.h"

namespace torch_ring {

/// The path of a connection to another rank. Between hosts with several network interfaces, data
/// connections use these in turn, by the number of their channel, and control connections use the
/// first. Both ranks use the same one.
struct Way {
  SocketAddress to;
  /// The own address to connect from; without it the system might use one interface for all. Empty
  /// if there is only one interface.
  std::optional<SocketAddress> from;
  std::string text;  // " from 10.0.1.1 to 10.0.1.2", where there is a choice
};

/// `channel`: Hello's.
Way way_to(const ControlOptions& options, int peer, std::uint32_t channel);

/// Connects to a rank's listener and authenticates, and retries until it succeeds. A probe only
/// checks, again and again, whether the rank listens.
///
/// Thread: one at a time. Blocking: no.
class Outgoing {
 public:
  enum class State { kPending, kRefused, kDone };
  static constexpr std::chrono::milliseconds kRetry{10};

  /// To rank `hello.to`.
  Outgoing(const ControlOptions& options, const Hello& hello);
  /// A probe every `interval`, from `first` on.
  Outgoing(const ControlOptions& options, int peer, std::chrono::milliseconds interval,
           Clock::time_point first);

  /// Makes the progress that is possible now. kRefused: nobody listens there; it keeps trying.
  /// kDone: take() has the socket; a probe has found a listener, and continues.
  /// Errors: Error(kInternal) if this process lacks descriptors or memory; Error(kMismatch) if the
  /// rank has another key. It may be called again after either.
  State advance(const PollSet& polls, Clock::time_point now);

  const Hello& hello() const noexcept { return hello_; }
  Socket take() { return authentication_->take(); }
  int fd() const noexcept { return authentication_ ? authentication_->fd() : socket_.get(); }
  /// Why the last attempt failed; empty if none has.
  const std::string& trouble() const noexcept { return trouble_; }

  void add_to(PollSet& polls);
  /// The time to call advance() although nothing is ready.
  Clock::time_point due() const { return fd() < 0 ? retry_ : Clock::time_point::max(); }

 private:
  State connect(Clock::time_point now);
  State shake_hands(Clock::time_point now);
  State fail(const char* call, int error, Clock::time_point now);

  const Way way_;
  const Key key_{};
  const std::shared_ptr<const TlsContext> tls_;
  const Hello hello_{};
  const std::optional<std::chrono::milliseconds> probe_;
  Clock::time_point retry_{};                     // the clock's beginning: at once
  Fd socket_;                                     // until it is connected
  std::optional<Authentication> authentication_;  // from then on
  std::string trouble_;
  std::size_t slot_ = PollSet::kNone;
};

/// Whether an errno says that this process, and not the peer, is in trouble.
bool is_local(int error);

/// The control connections that a rank still lacks. Of two ranks the higher one connects. The lower
/// one waits, and probes now and then whether the other still listens, because otherwise nobody
/// might notice its death.
///
/// Thread: one at a time. Blocking: no.
class DialRequests {
 public:
  /// How long a rank without a listener may still have left in peace, because the news of its
  /// departure may be on its way.
  static constexpr std::chrono::milliseconds kGrace{250};
  static constexpr std::chrono::milliseconds kProbe{100};
  static constexpr std::chrono::seconds kSetupProbe{2};  // many ranks wait for one another

  struct Outcome {
    std::vector<std::pair<int, Socket>> connected;  // by rank
    std::vector<int> refused;                       // nobody listens there
    std::vector<int> gone;                          // the same, after renew()
    std::vector<int> silent;                        // no connection for the heartbeat timeout
    std::optional<std::pair<int, Error>> error;     // of this process, or its key
  };

  /// `options` must outlive it.
  explicit DialRequests(const ControlOptions& options) : options_(options) {}

  /// Requests a connection to `peer`, unless one is requested already.
  void add(int peer, Clock::time_point now, bool setup);
  /// Requests a connection in place of one that was reset. A process that dies closes its listener
  /// a moment before or after its connections: so a refusal counts at once, and is sought often.
  void renew(int peer, Clock::time_point now);
  void remove(int peer) { dials_.erase(peer); }

  /// `setup`: all ranks listened a moment ago, so a refusal counts at once; and the owner decides
  /// how long to wait.
  Outcome advance(const PollSet& polls, Clock::time_point now, bool setup);
  /// Restarts all waits: this process was stopped meanwhile.
  void excuse(Clock::time_point now);

  /// Why the last attempt failed: "rank 3 (...): connect: ..."; empty if none has.
  const std::string& trouble() const noexcept { return trouble_; }

  void add_to(PollSet& polls);
  Clock::time_point due(bool setup) const;
  void append_descriptors(std::vector<int>& fds) const;
  void close() { dials_.clear(); }

 private:
  struct DialRequest {
    DialRequest(Clock::time_point now, Outgoing first) : since(now), outgoing(std::move(first)) {}
    Clock::time_point since;
    bool renews = false;
    std::optional<Clock::time_point> refused_since;
    Outgoing outgoing;
  };

  DialRequest& emplace(int peer, Clock::time_point now, std::chrono::milliseconds interval,
                       Clock::time_point first);

  const ControlOptions& options_;
  std::map<int, DialRequest> dials_;  // by rank
  std::string trouble_;
};

/// The data connections that are being made, and those that no SocketSource has taken yet.
/// Connections are accepted also for a set that this rank does not know yet, because a peer may use
/// it first.
///
/// Thread: one at a time. Blocking: no.
class DataConnections {
 public:
  static constexpr std::uint32_t kChannels = 64;   // to a peer
  static constexpr std::size_t kUntaken = 16'384;  // accepted

  /// `options` must outlive it.
  explicit DataConnections(const ControlOptions& options) : options_(options) {}

  /// Begins to make `width` connections to `peer`. Returns false if it has begun before.
  bool connect(std::uint64_t set, int peer, int width);

  /// Keeps an accepted connection. Returns false if it refuses it.
  bool accept(const Hello& hello, Socket socket);

  /// The `width` sockets in the order of their channels, once; none before all are there.
  /// Errors: the one that prevents them, once; then connect() may try again.
  std::vector<Socket> take(std::uint64_t set, int peer, int width);

  /// The sockets that have been taken so far.
  std::uint64_t taken() const { return taken_; }

  /// Advances the connections that are being made. Returns the sets for which take() has sockets or
  /// an error.
  std::vector<std::uint64_t> advance(const PollSet& polls, Clock::time_point now);

  /// Begins no more connections to a peer that is gone. Complete connections stay, and attempts
  /// with a socket go on, because the peer may have sent its last data on them.
  void forget(int peer);

  /// Why the last attempt to connect to `peer` failed; empty if none has.
  std::string trouble(std::uint64_t set, int peer) const;

  /// Whether connections to `peer` are being made.
  bool is_connecting(std::uint64_t set, int peer) const;
  /// Closes the set's connections, and refuses later ones.
  void close(std::uint64_t set);
  void close_all() { pairs_.clear(); }
  /// The intervals of numbers of closed sets, which take memory.
  std::size_t closed_intervals() const { return closed_.intervals(); }

  void add_to(PollSet& polls);
  Clock::time_point due() const;
  void append_descriptors(std::vector<int>& fds) const;

 private:
  struct Pair {
    std::map<std::uint32_t, Socket> ready;  // by channel
    std::list<Outgoing> outgoing;
    std::optional<Error> error;
    bool gone = false;  // no new attempts
  };

  const ControlOptions& options_;
  std::map<std::pair<std::uint64_t, int>, Pair> pairs_;  // by (set, peer)
  IntervalSet closed_;  // set numbers begin at 0: one interval, except for live sets
  std::size_t untaken_ = 0;
  std::uint64_t taken_ = 0;
};

}  // namespace torch_ring
