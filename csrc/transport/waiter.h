// SPDX-License-Identifier: Apache-2.0
// Waiter: waits for peers. It spins, yields, then sleeps; each wait has a deadline and can abort.
#pragma once

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/abort.h"
#include "core/clock.h"
#include "transport/doorbell.h"
#include "transport/network.h"
#include "transport/wait_graph.h"

namespace torch_ring {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// A wait that lasts: the ranks that this one waits for, and its progress as a text.
struct Standstill {
  std::vector<int> ranks;
  std::string text;
};

/// Thread: the communicator's progress thread, except wake(). Blocking: as each function says.
/// Errors: the Abort's cause; Error(kTimeout) when nothing moved for `timeout`; LongWait's.
class Waiter {
 public:
  /// `may_spin`: whether every rank on this kernel has a core of its own. `graph`: finds the ranks
  /// for a timeout's error; may be null.
  Waiter(const Abort& abort, Doorbell& doorbell, bool may_spin, std::chrono::milliseconds timeout,
         std::shared_ptr<WaitGraph> graph = nullptr)
      : abort_(abort),
        doorbell_(doorbell),
        may_spin_(may_spin),
        timeout_(timeout),
        graph_(std::move(graph)) {}

  /// Returns when ready() holds: it loads the peers' data by seq_cst loads, as Doorbell::sleep()
  /// requires. `stuck` gives the Standstill of the timeout's error. A sleep also ends when one of
  /// `fds` is ready, or there is something to move for `network`, if it is not null.
  template <class Ready, class Stuck>
  void wait(Ready&& ready, Stuck&& stuck, std::span<const pollfd> fds = {},
            Network* network = nullptr) const {
    if (ready()) return;
    auto now = Clock::now();
    const auto deadline = now + timeout_;
    LongWait wait(graph_.get());
    while (!wait_until(ready, std::min(deadline, now + kPoll), kSpin, fds, network)) {
      now = Clock::now();
      if (now >= deadline) throw Error(ErrorKind::kTimeout, blame(stuck()));
      wait.lasts(now, [&] { return stuck().ranks; });
    }
  }

  /// Returns whether ready() holds, at `deadline` at the latest. May return false earlier: the
  /// doorbell also rings for other reasons. Spins for `spin` before it sleeps, if it may. Throws
  /// only the Abort's cause, and only while ready() does not hold: the work of peers before a death
  /// counts.
  template <class Ready>
  bool wait_until(Ready&& ready, Clock::time_point deadline, std::chrono::microseconds spin,
                  std::span<const pollfd> fds = {}, Network* network = nullptr) const {
    // Otherwise the yields below let another rank of an oversubscribed host run.
    if (may_spin_) {
      // By the clock, because ready() is one load in shared memory but two system calls on a
      // socket.
      const auto end = Clock::now() + spin;
      do {
        for (int i = 0; i < 16; ++i) {
          if (ready()) return true;
          pause_cpu();
        }
      } while (Clock::now() < end);
    }
    for (int i = 0; i < kYields; ++i) {
      if (ready()) return true;
      abort_.check();
      ::sched_yield();
    }
    const auto awake = [&] { return abort_.raised() || ready(); };
    if (network) {
      sleep_beside(*network, awake, deadline, fds);
    } else {
      doorbell_.sleep(awake, deadline, fds);
    }
    if (ready()) return true;
    abort_.check();
    return false;
  }

  /// Ends the sleep of the progress thread, if it sleeps. Call after a seq_cst store of the data
  /// that its ready() loads. Thread: any. Blocking: no.
  void wake() const { doorbell_.wake(); }

  std::chrono::milliseconds timeout() const { return timeout_; }
  const Abort& abort() const { return abort_; }

 private:
  static constexpr int kYields = 20;
  // How often a long wait checks whether to tell the other ranks.
  static constexpr std::chrono::milliseconds kPoll{50};

  template <class Awake>
  void sleep_beside(Network& network, Awake&& awake, Clock::time_point deadline,
                    std::span<const pollfd> fds) const {
    std::vector<pollfd> all(fds.size() + 1);
    const auto armed = [&] {
      if (awake() || !network.arm()) return true;
      // Filled now, since ready() may have changed `fds`, and made the network's first stream.
      all.front() = {network.fd(), POLLIN, 0};
      std::ranges::copy(fds, all.begin() + 1);
      return false;
    };
    doorbell_.sleep(armed, deadline, all);
  }

  /// The text of a standstill with the ranks that cause it: the peer may itself wait for another.
  std::string blame(const Standstill& still) const {
    if (!graph_) return still.text;
    const std::vector<int> ends = graph_->ends(still.ranks);
    std::string text;
    for (const int rank : ends) text.append(text.empty() ? "" : ", ").append(graph_->label(rank));
    return still.text + ". All wait for " + text + ": it is stuck, or stopped";
  }

  const Abort& abort_;
  Doorbell& doorbell_;
  const bool may_spin_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<WaitGraph> graph_;
};

}  // namespace torch_ring
