// SPDX-License-Identifier: Apache-2.0
// Watchdog: passes the control plane's news of a process set on to its engine. Lateness: finds the
// rank that is usually last.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "control/control_plane.h"
#include "core/abort.h"
#include "core/clock.h"

namespace torch_ring {

/// Sums up, once a minute, the waits of the ranks for agreements, and names the rank that was last
/// in most of them. Pure: the times are given.
///
/// All ranks would report the same, so only rank 0 does.
///
/// Thread: one at a time. Blocking: no. Cost of a wait that is not notable: a comparison.
class Lateness {
 public:
  // A rank that is this late costs more than the noise of a busy machine.
  static constexpr std::chrono::milliseconds kNotable{10};
  static constexpr std::chrono::seconds kPeriod{60};
  static constexpr std::size_t kFewest = 10;  // waits in a period that are worth a line

  Lateness(int rank, int size) : waits_(rank == 0 ? static_cast<std::size_t>(size) : 0) {}

  /// A rank has waited `lag` for an agreement, in which `last` was last (-1: unknown). At the end
  /// of a period in which one rank was last in most of the notable waits, returns a line for the
  /// log.
  std::optional<std::string> note(int last, std::chrono::nanoseconds lag, Clock::time_point now) {
    if (lag < kNotable || waits_.empty()) return std::nullopt;
    return note_notable(last, lag, now);
  }

 private:
  std::optional<std::string> note_notable(int last, std::chrono::nanoseconds lag,
                                          Clock::time_point now);
  std::optional<std::string> sum_up() const;

  // Of this period, by the last rank; empty on ranks that do not report.
  std::vector<std::vector<std::chrono::nanoseconds>> waits_;
  std::optional<Clock::time_point> begin_;  // of the period
};

/// The one of `candidates` (empty: any rank) that was last in the round in which `last` posted
/// last; -1: unknown. The rank that posted last may have announced only other operations there.
int last_of(const std::vector<int>& candidates, int last);

/// One engine's part in the control plane of its process. A rank of the set that is lost, or that
/// has given up the set, ends the set: the watchdog raises the engine's Abort.
///
/// A rank that has left is an error only for the ranks that wait for it. It has told the number of
/// rounds of the board that it completed, and a round is complete on one rank only after all have
/// posted. So its data for those rounds is on its way, however long the network takes, and no data
/// for later ones will follow: no clock is needed to tell. Every rank decides that for itself. A
/// clock ends only the wait for data that never arrives, because the host has been cut off since
/// (LongWait).
///
/// Thread: any; stop() one at a time. Blocking: root_cause().
class Watchdog final : private ControlObserver {
 public:
  /// `plane`: null in a world of one; it outlives stop(). `set`: the set's number in the plane.
  /// `members`: its ranks in the world, by their rank in the set; `labels` likewise. `leave`:
  /// Words::leave. The plane's
  /// thread calls `raised` after it has raised `abort`, noticed a departure, or made a connection.
  Watchdog(ControlPlane* plane, std::uint64_t set, std::vector<int> members,
           std::vector<std::string> labels, std::string leave, Abort& abort,
           std::function<void()> raised);
  ~Watchdog() override { stop(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Ends the subscription to the plane.
  void stop();

  /// Tells the other ranks of the set the cause of a local failure.
  void announce(const Error& cause);

  /// Tells them that this rank leaves in peace, after `rounds` rounds of the board. `why`: see
  /// ControlPlane::leave().
  void leave(std::uint64_t rounds, std::string why = {});

  /// Throws Error(kPeerLost) if a rank left some time ago, before it completed `round`, counted
  /// from 1. The delay lets the program submit everything that it is about to wait for.
  void check_departures(std::uint64_t round) const;

  /// The same, at once, for a round whose data is about to move. If a rank leaves before
  /// end_data(), the abort is raised: in shared memory nothing else would end the wait for its
  /// data.
  void begin_data(std::uint64_t round);
  void end_data() { moving_.store(0, std::memory_order_relaxed); }

  struct Cause {
    Error error;
    bool is_departure;  // which this rank does not announce
  };

  /// The cause of a failure in `round`. A failing rank closes its connections, so its peers lose it
  /// while its cause, or its goodbye, is still on its way to this rank. A rank that answers on its
  /// control connection has no cause to tell: the network has cut the connection.
  /// Blocking: until one of these arrives, at most 5 s.
  Cause root_cause(const Error& error, std::uint64_t round) const;

 private:
  struct Departure {
    int rank;                             // in the world
    std::optional<std::uint64_t> rounds;  // completed by it, if known
    std::string why;                      // empty if its program has not failed
    Clock::time_point since;
  };

  void on_lost(int rank, const std::string& how) override;
  void on_departed(int rank, std::optional<std::uint64_t> rounds, const std::string& why) override;
  void on_failed(int rank, ErrorKind kind, const std::string& why) override;
  void on_connected() override;

  std::optional<Error> departure_before(std::uint64_t round, Clock::duration grace) const;
  Error departed(const Departure& departure) const;
  const std::string& label(int rank) const;

  ControlPlane* plane_;
  const std::uint64_t set_;
  const std::vector<int> members_;
  const std::vector<std::string> labels_;
  const std::string leave_;
  Abort& abort_;
  const std::function<void()> raised_;

  // The round whose data moves; 0: none. begin_data() stores it before it loads any_departed_, and
  // on_departed() the other way round, all seq_cst: one of them sees the other's store.
  std::atomic<std::uint64_t> moving_{0};
  std::atomic<bool> any_departed_{false};

  mutable std::mutex mutex_;  // guards the members below
  std::vector<Departure> departures_;
};

}  // namespace torch_ring
