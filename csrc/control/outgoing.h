// Outgoing: a connection to another rank in the making.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/link.h"
#include "control/news.h"
#include "control/options.h"
#include "core/clock.h"
#include "core/fd.h"
#include "transport/handshake.h"

namespace torch_ring {

/// The way of a connection to another rank. Between hosts with several network interfaces, data
/// connections use these in turn, by the number of their channel, and control connections the
/// first: of both ranks the same one.
struct Way {
  SocketAddress to;
  /// The own address from which it comes, or else the system might send all by one interface. With
  /// one, the system chooses.
  std::optional<SocketAddress> from;
  std::string text;  // " from 10.0.1.1 to 10.0.1.2", where there is a choice
};

/// `channel`: Hello's.
Way way_to(const ControlOptions& options, int peer, std::uint32_t channel);

/// Connects to a rank's listener and authenticates, again and again until it succeeds. Or, as a
/// probe, only asks again and again whether somebody listens there.
///
/// Thread: one at a time. Blocking: no.
class Outgoing {
 public:
  enum class State { kPending, kRefused, kDone };
  static constexpr std::chrono::milliseconds kRetry{50};

  /// To rank `hello.to`.
  Outgoing(const ControlOptions& options, const Hello& hello);
  /// A probe: each `interval`, at first after one.
  Outgoing(const ControlOptions& options, int peer, std::chrono::milliseconds interval,
           Clock::time_point now);

  /// Does what is possible now, if something is. kRefused: nobody listens there; this goes on
  /// trying. kDone: take() has the socket; a probe has found a listener, and goes on.
  /// Errors: Error(kInternal) if this process lacks descriptors or memory; Error(kMismatch) if the
  /// rank has another key. It may be called again all the same.
  State advance(const PollSet& polls, Clock::time_point now);

  const Hello& hello() const noexcept { return hello_; }
  Fd take() { return std::move(socket_); }
  int fd() const noexcept { return socket_.get(); }
  /// Why the last attempt failed; empty if none has.
  const std::string& trouble() const noexcept { return trouble_; }

  void add_to(PollSet& polls);
  /// When to call advance() although nothing is ready.
  Clock::time_point due() const { return socket_ ? Clock::time_point::max() : retry_; }

 private:
  State connect(Clock::time_point now);
  State shake_hands(Clock::time_point now);
  State fail(const char* call, int error, Clock::time_point now);

  const Way way_;
  const Key key_{};
  const Hello hello_{};
  const std::optional<std::chrono::milliseconds> probe_;
  Clock::time_point retry_{};  // the clock's beginning: at once
  Fd socket_;
  std::optional<Handshake> handshake_;  // once it is connected
  std::string trouble_;
  std::size_t slot_ = PollSet::kNone;
};

/// Moves a handshake on as far as the socket allows. Returns 0, or the errno with which the
/// connection ended (ECONNRESET if it was closed). Errors: those of the handshake.
int advance_handshake(Handshake& handshake, int fd);

/// Whether an errno says that this process, and not the peer, is in trouble.
bool is_local(int error);

/// The control connections that a rank still lacks. Of two ranks the higher one connects. The
/// lower one waits, and asks now and then whether the other still listens, for else nobody
/// might notice its death.
///
/// Thread: one at a time. Blocking: no.
class DialRequests {
 public:
  /// For so long a rank whose listener is gone may still have left in peace: the word of it may be
  /// on its way.
  static constexpr std::chrono::milliseconds kGrace{250};
  static constexpr std::chrono::milliseconds kProbe{100};
  static constexpr std::chrono::seconds kSetupProbe{2};  // many ranks wait for one another then

  struct Outcome {
    std::vector<std::pair<int, Fd>> connected;   // by rank
    std::vector<int> refused;                    // nobody listens there
    std::vector<int> silent;                     // no connection for the heartbeat timeout
    std::optional<std::pair<int, Error>> error;  // of this process, or its key
  };

  /// `options` must outlive it.
  explicit DialRequests(const ControlOptions& options) : options_(options) {}

  /// Begins to ask for a connection to `peer`, unless it does already.
  void add(int peer, Clock::time_point now, bool setup);
  void remove(int peer) { dials_.erase(peer); }

  /// `setup`: all ranks listened a moment ago and none has been used, so a refusal counts at once;
  /// and its owner decides how long it waits.
  Outcome advance(const PollSet& polls, Clock::time_point now, bool setup);
  /// Forgets how long it has waited: this process was stopped meanwhile.
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
    std::optional<Clock::time_point> refused_since;
    Outgoing outgoing;
  };

  const ControlOptions& options_;
  std::map<int, DialRequest> dials_;  // by rank
  std::string trouble_;
};

/// The data connections that are in the making, or that nobody has taken yet. Accepted
/// connections are kept also for a set of which this rank does not know yet: a peer may use it
/// first.
///
/// Thread: one at a time. Blocking: no.
class DataConnections {
 public:
  static constexpr std::uint32_t kChannels = 64;   // to a peer
  static constexpr std::size_t kUntaken = 16'384;  // accepted

  /// `options` must outlive it.
  explicit DataConnections(const ControlOptions& options) : options_(options) {}

  /// Begins to make `width` connections to `peer`. Returns whether that is news.
  bool connect(std::uint64_t set, int peer, int width);

  /// Keeps an accepted connection. Returns whether it is one that may be taken.
  bool accept(const Hello& hello, Fd socket);

  /// The `width` sockets in the order of their channels, once; none before all are there.
  /// Errors: why they cannot be made, once; then connect() may try again.
  std::vector<Fd> take(std::uint64_t set, int peer, int width);

  /// The sockets that have been taken so far.
  std::uint64_t taken() const { return taken_; }

  /// Goes on connecting. Returns the sets for which take() has news.
  std::vector<std::uint64_t> advance(const PollSet& polls, Clock::time_point now);

  /// No more connections are begun to a peer that is gone. Those that are there stay, and those on
  /// which it may have answered come to their end: it may have sent its last data.
  void forget(int peer);

  /// Why the last attempt to connect to `peer` failed; empty if none has.
  std::string trouble(std::uint64_t set, int peer) const;

  /// Whether connections to `peer` are being made.
  bool is_connecting(std::uint64_t set, int peer) const;
  /// Closes the set's connections, and refuses later ones.
  void close(std::uint64_t set);
  void close_all() { pairs_.clear(); }
  /// The set has ended on all ranks: a connection that comes yet is not to be given to accept().
  void forget_closed(std::uint64_t set) { closed_.erase(set); }
  /// The intervals of numbers of closed sets: the memory that they cost.
  std::size_t closed_intervals() const { return closed_.intervals(); }

  void add_to(PollSet& polls);
  Clock::time_point due() const;
  void append_descriptors(std::vector<int>& fds) const;

 private:
  struct Pair {
    std::map<std::uint32_t, Fd> ready;  // by channel
    std::list<Outgoing> outgoing;
    std::optional<Error> error;
    bool gone = false;  // no attempt is made again
  };

  const ControlOptions& options_;
  std::map<std::pair<std::uint64_t, int>, Pair> pairs_;  // by (set, peer)
  IntervalSet closed_;  // sets are numbered from 0 on: one interval, but for those that live
  std::size_t untaken_ = 0;
  std::uint64_t taken_ = 0;
};

}  // namespace torch_ring
