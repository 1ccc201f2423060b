// Watchdog: a thread that notices dead, silent and departed ranks.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/abort.h"
#include "core/at.h"
#include "core/clock.h"
#include "core/config.h"
#include "core/fd.h"

namespace torch_ring {

/// The watchdog's thread sleeps in poll() on one control connection per peer. A process that dies
/// closes its end, so every other rank learns of it within milliseconds. A process that is stopped
/// or cut off sends no more heartbeats. A rank that fails on its own tells the others why, and a
/// rank that loses a peer tells them which.
///
/// A message on a control connection: u8 kind, u8 ErrorKind, u16 bytes of text, text.
///
/// Thread: any, but for stop(), which one thread calls at a time. Blocking: stop() and
/// root_cause().
class Watchdog {
 public:
  /// `control`: a connection for each rank, and none for this one. The watchdog's thread calls
  /// `raised` after it has raised `abort` or noticed a departure.
  Watchdog(int rank, std::vector<Fd> control, std::vector<std::string> labels,
           std::chrono::milliseconds heartbeat_timeout, Abort& abort, std::function<void()> raised);
  ~Watchdog() { stop(); }

  /// Says goodbye to every peer, joins the thread, and closes the connections.
  void stop();

  /// Sends the cause of a local failure to every peer. Blocking: no.
  void announce(const Error& cause);

  /// Throws Error(kPeerLost) if a rank has said goodbye so long ago that all it had posted has
  /// arrived. Blocking: no.
  void check_departures() const;

  /// The cause of a failed transfer. A rank that fails closes its connections, so its peers lose
  /// it while its cause, or its goodbye, is still on its way to this watchdog.
  /// Blocking: until one of them is here, at most 250 ms.
  Error root_cause(const Error& error) const;

 private:
  struct Departure {
    int rank;
    Clock::time_point since;
  };
  enum class Message : std::uint8_t { kHeartbeat = 'H', kGoodbye = 'G', kAbort = 'A', kLost = 'L' };
  struct Peer {
    int rank;
    Fd socket;
    std::string received;  // bytes of messages that are not complete yet
    Clock::time_point heard;
    bool departed = false;
  };

  void run();
  void receive(Peer& peer);
  void handle(Peer& peer, Message message, ErrorKind kind, const std::string& text);
  void lose(const Peer& peer, const std::string& how);
  void send_all(Message message, ErrorKind kind, const std::string& text);
  std::optional<Departure> departure() const;
  Error departed(int rank) const;
  const std::string& label(const Peer& peer) const { return at(labels_, peer.rank); }

  const int rank_;
  const std::vector<std::string> labels_;
  const std::chrono::milliseconds heartbeat_timeout_;
  Abort& abort_;
  const std::function<void()> raised_;
  std::vector<Peer> peers_;
  Fd wake_;

  mutable std::mutex mutex_;  // guards what follows
  std::optional<Error> announcement_;
  std::optional<Departure> departure_;  // of the first rank that said goodbye
  bool stopping_ = false;

  std::thread thread_;  // the last member: the thread uses all of the above
};

}  // namespace torch_ring
