// Entrance: the listeners, and the connections that must still authenticate themselves.
#pragma once

#include <list>
#include <optional>
#include <vector>

#include "control/poll_set.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"
#include "transport/handshake.h"

namespace torch_ring {

/// Accepts whoever connects, at most kStrangers at a time, gives each kPatience, and drops it
/// without a word if it does not know the key. The peer of a Unix socket must belong to this user.
///
/// Thread: one at a time. Blocking: no.
class Entrance {
 public:
  static constexpr std::size_t kStrangers = 256;
  static constexpr std::chrono::seconds kPatience{5};

  struct Arrival {
    Hello hello;
    Fd socket;
    bool unix;  // it has come over the Unix socket, from a process of this user
  };

  Entrance(std::uint32_t rank, const Key& key, Fd unix_listener, Fd tcp_listener);

  /// Accepts and authenticates as far as possible now; the connections that are done.
  std::vector<Arrival> admit(const PollSet& polls, Clock::time_point now);

  /// Why it cannot accept at the moment: it lacks descriptors or memory.
  const std::optional<Error>& trouble() const noexcept { return trouble_; }

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
    Fd socket;
    Handshake handshake;
    bool unix;
    Clock::time_point deadline;
    std::size_t slot = PollSet::kNone;
  };

  void accept(Listener& listener, Clock::time_point now);
  /// Whether the stranger is to be dropped; a peer that is done is moved to `arrivals`.
  bool advance(Stranger& stranger, std::vector<Arrival>& arrivals);

  const std::uint32_t rank_;
  const Key key_;
  std::vector<Listener> listeners_;
  std::list<Stranger> strangers_;
  std::optional<Error> trouble_;
  Clock::time_point pause_{};  // accepts nobody before
};

}  // namespace torch_ring
