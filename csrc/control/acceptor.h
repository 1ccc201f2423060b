// SPDX-License-Identifier: Apache-2.0
// Acceptor: the listeners, and the connections that must still authenticate themselves.
#pragma once

#include <sys/types.h>

#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "control/link.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"
#include "transport/authentication.h"

namespace torch_ring {

/// Accepts every connection, and drops one that does not prove within kPatience that it knows the
/// key. The peer of a Unix socket must belong to this user.
///
/// Strangers (connections not yet authenticated) take at most a quarter of the descriptors that
/// this process may have, and at most kStrangers. If others wait, a stranger makes room after
/// kHaste, or after kSilence if it has sent nothing: a peer sends its hello as soon as it is
/// connected. The newest stranger goes first, so that a flood does not drive out a peer that came
/// before it.
///
/// Thread: one at a time. Blocking: no.
class Acceptor {
 public:
  static constexpr std::size_t kStrangers = 1024;
  static constexpr std::chrono::seconds kPatience{5};
  static constexpr std::chrono::seconds kHaste{1};
  static constexpr std::chrono::milliseconds kSilence{250};
  /// trouble() does not report errors of accept() that end within this time.
  static constexpr std::chrono::seconds kTrouble{2};

  struct Arrival {
    Hello hello;
    Socket socket;
    bool unix;  // it came over the Unix socket, from a process of this user
  };

  /// `tls`: of the connections over TCP; null: they are in the clear.
  Acceptor(std::uint32_t rank, const Key& key, Fd unix_listener, std::vector<Fd> tcp_listeners,
           std::shared_ptr<const TlsContext> tls = nullptr);

  /// Accepts and authenticates as far as possible now; returns the authenticated connections.
  std::vector<Arrival> admit(const PollSet& polls, Clock::time_point now);

  /// The error with which every accept() has failed for kTrouble: no descriptors or no memory.
  std::optional<Error> trouble(Clock::time_point now) const;

  /// The process that has come as this rank, too, since the last call (setup/socket_name.py).
  std::optional<pid_t> take_rival() { return std::exchange(rival_, std::nullopt); }

  void add_to(PollSet& polls, Clock::time_point now);
  /// When to call admit() although nothing is ready.
  Clock::time_point due() const;

  void append_descriptors(std::vector<int>& fds) const;
  void close();

 private:
  struct Listener {
    Fd socket;
    bool unix;
    std::size_t slot = PollSet::kNone;
  };
  struct Stranger {
    Authentication authentication;
    bool unix;
    Clock::time_point since;
    bool has_spoken = false;
    std::size_t slot = PollSet::kNone;

    /// The time from which on it makes room for others.
    Clock::time_point yields() const { return since + (has_spoken ? kHaste : kSilence); }
  };

  void accept(Listener& listener, Clock::time_point now);
  /// Drops a stranger whose time is up; returns whether there was one.
  bool make_room(Clock::time_point now);
  /// Returns whether to drop the stranger; moves it to `arrivals` if it is authenticated.
  bool advance(Stranger& stranger, std::vector<Arrival>& arrivals);

  const std::uint32_t rank_;
  const Key key_;
  const std::shared_ptr<const TlsContext> tls_;
  const std::size_t room_;
  std::vector<Listener> listeners_;
  std::list<Stranger> strangers_;  // the oldest first
  std::optional<Error> trouble_;   // the error of accept(), which has failed without a break
  Clock::time_point troubled_{};   // since this time
  Clock::time_point pause_{};      // accepts no connection before this time
  bool listens_ = true;            // in this poll
  std::optional<pid_t> rival_;     // not taken yet
};

}  // namespace torch_ring
