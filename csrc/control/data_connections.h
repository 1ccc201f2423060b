// DataConnections: the data connections that are in the making, or that nobody has taken yet.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "control/number_runs.h"
#include "control/options.h"
#include "control/outgoing.h"

namespace torch_ring {

/// Accepted connections are kept also for a set of which this rank does not know yet: a peer may
/// use it first.
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

  /// Whether connections to `peer` are being made.
  bool is_connecting(std::uint64_t set, int peer) const;
  /// Closes the set's connections, and refuses later ones.
  void close(std::uint64_t set);
  void close_all() { pairs_.clear(); }
  /// The set has ended on all ranks: a connection that comes yet is not to be given to accept().
  void forget_closed(std::uint64_t set) { closed_.erase(set); }
  /// The runs of numbers of closed sets, which is the memory that they cost.
  std::size_t closed_runs() const { return closed_.runs(); }

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
  NumberRuns closed_;  // sets are numbered from 0 on: one run, but for those that still live
  std::size_t untaken_ = 0;
  std::uint64_t taken_ = 0;
};

}  // namespace torch_ring
