// Watchdog: what the control plane tells an engine of the ranks of its process set.
#pragma once

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

/// One engine's part in the control plane of its process. A rank of the set that is lost, or that
/// has given the set up, ends the set: the watchdog raises the engine's Abort. A rank that has left
/// is an error only for whoever waits for it.
///
/// Thread: any, but for stop(), which one thread calls at a time. Blocking: root_cause().
class Watchdog final : private ControlObserver {
 public:
  /// `plane`: null in a world of one; it outlives stop(). `set`: the set's number in the plane.
  /// `members`: its ranks in the world, by their rank in the set; `labels` likewise. The plane's
  /// thread calls `raised` after it has raised `abort`, noticed a departure, or made a connection.
  Watchdog(ControlPlane* plane, std::uint64_t set, std::vector<int> members,
           std::vector<std::string> labels, Abort& abort, std::function<void()> raised);
  ~Watchdog() override { stop(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Hears no more of the plane.
  void stop();

  /// Tells the other ranks of the set the cause of a local failure.
  void announce(const Error& cause);

  /// Throws Error(kPeerLost) if a rank has left so long ago that all it had posted has arrived.
  void check_departures() const;

  /// The cause of a failed transfer. A rank that fails closes its connections, so its peers lose
  /// it while its cause, or its goodbye, is still on its way to this rank.
  /// Blocking: until one of them is here, at most 250 ms.
  Error root_cause(const Error& error) const;

 private:
  struct Departure {
    int rank;  // in the world
    Clock::time_point since;
  };

  void on_lost(int rank, const std::string& how) override;
  void on_departed(int rank) override;
  void on_failed(int rank, ErrorKind kind, const std::string& why) override;
  void on_connected() override;

  std::optional<Departure> departure() const;
  Error departed(int rank) const;
  const std::string& label(int rank) const;

  ControlPlane* plane_;
  const std::uint64_t set_;
  const std::vector<int> members_;
  const std::vector<std::string> labels_;
  Abort& abort_;
  const std::function<void()> raised_;

  mutable std::mutex mutex_;            // guards what follows
  std::optional<Departure> departure_;  // of the first rank that left
};

}  // namespace torch_ring
