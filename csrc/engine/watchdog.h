// Watchdog: knows which ranks are alive.
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

/// A thread that sleeps in poll() on one control connection per peer. A process that dies closes
/// its end, so every other rank learns of it within milliseconds; one that is stopped, or cut off,
/// is missed by its heartbeats. A rank that fails on its own tells the others why, and one that
/// misses a peer tells them which.
///
/// A message on a control connection: u8 kind, u8 ErrorKind, u16 bytes of text, text.
///
/// Thread: the public functions may be called from any.
class Watchdog {
 public:
  /// `control`: rank -> connection, closed for this rank. `raised` is called, on the watchdog's
  /// thread, after it has raised `abort` or noticed a departure.
  Watchdog(int rank, std::vector<Fd> control, std::vector<std::string> labels,
           std::chrono::milliseconds heartbeat_timeout, Abort& abort, std::function<void()> raised);
  /// Says goodbye to every peer and joins the thread.
  ~Watchdog();

  /// Sends the cause of a local failure to every peer. Blocking: no.
  void announce(const Error& cause);

  struct Departure {
    int rank;
    Clock::time_point since;
  };
  /// The first rank that has said goodbye.
  std::optional<Departure> departure() const;

 private:
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
  std::optional<Departure> departure_;
  bool stopping_ = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace torch_ring
