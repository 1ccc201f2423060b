// SPDX-License-Identifier: Apache-2.0
// Doorbell: lets one rank sleep, and wakes others.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "core/clock.h"
#include "core/fd.h"

struct pollfd;

namespace torch_ring {

/// A rank's own doorbell: a word that says how its owner sleeps. The word lies in the owner's
/// shared memory, where its peers find it, or in the doorbell itself if only threads of this
/// process ring. A doorbell needs no descriptor, unless its owner has sockets to poll:
///
///   state     the owner                    a ringer
///   kAwake    runs, or is being woken      does nothing
///   kInFutex  sleeps on the word (futex)   sets kAwake, and wakes the futex
///   kInPoll   sleeps in poll() on its      sets kAwake, and sends a byte to the socket's name,
///             sockets and a datagram       which stands beside the state
///             socket of its own
///
/// No wake-up is lost:
///  - The sleeper stores its state and then loads the data once more, in ready(); a ringer stores
///    the data and then loads the state. All four are sequentially consistent, so at least one of
///    the two sees the other's store. With acquire loads both may miss it: an ARM processor may
///    perform the load before its own store becomes visible.
///  - A ringer that finds kAwake although the owner sleeps reads the store of another ringer, which
///    wakes the owner. The owner stores a state before its next sleep, and loads the data after
///    that.
///  - The futex compares the word with kInFutex when it begins to wait, so it does not wait if a
///    ringer came first. A datagram that came first makes the socket readable.
///  - The socket has its name before a state says kInPoll: the ringer's exchange acquires both.
///  - A ringer that dies between setting kAwake and waking leaves the owner asleep. Its death is
///    noticed in the owner's process, where wake() does not rely on the word.
/// A late ring, a stranger's datagram or an outdated name costs at most one needless wake-up.
class Doorbell {
 public:
  enum State : std::uint32_t { kAwake, kInFutex, kInPoll };

  // 31 steps of an exchange among 2^31 hosts, the step that is due, and a network.
  static constexpr std::size_t kMostFds = 33;

  /// The state that ringers must find. All zeros: awake, and without a socket.
  struct Word {
    std::atomic<std::uint32_t> state{kAwake};
    std::atomic<std::uint64_t> name{0};  // of the datagram socket: the characters after its zero
  };

  /// A doorbell with a word of its own.
  Doorbell() : word_(private_word_) {}
  /// The doorbell of the owner of `word`, which must outlive it.
  explicit Doorbell(Word& word) : word_(word) {}
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  /// Wakes the rank that owns `peer`, if it sleeps. Call after a seq_cst store of the data that it
  /// waits for. Thread: the owner's progress thread. Blocking: no. Errors: Error(kInternal) without
  /// a descriptor for a socket, if the peer polls.
  void ring(Word& peer) {
    if (peer.state.load(std::memory_order_seq_cst) != kAwake) ring_sleeper(peer);
  }

  /// Wakes the owner if it sleeps. Call after a seq_cst store of the data that it waits for.
  /// Thread: any of this process. Blocking: no.
  void wake() noexcept {
    if (sleeps_.load(std::memory_order_seq_cst) != kAwake) wake_owner();
  }

  /// Sleeps until the doorbell rings, until one of `fds` (at most kMostFds) is ready, or until
  /// `deadline`; not at all if ready() holds. May return early, after a signal or without a reason.
  /// ready() loads the ringers' data by seq_cst loads (see above).
  /// Thread: only the owner, one at a time. Blocking: until `deadline`. Errors: Error(kInternal)
  /// without a descriptor for the socket, the first time that there are `fds`.
  template <class Ready>
  void sleep(Ready&& ready, Clock::time_point deadline, std::span<const pollfd> fds = {}) {
    if (!fds.empty() && !socket_) open_socket();
    const State state = fds.empty() ? kInFutex : kInPoll;
    sleeps_.store(state, std::memory_order_seq_cst);
    word_.state.store(state, std::memory_order_seq_cst);
    if (!ready()) {
      if (state == kInFutex) {
        wait_in_futex(deadline);
      } else {
        wait_in_poll(deadline, fds);
      }
    }
    word_.state.store(kAwake, std::memory_order_relaxed);
    sleeps_.store(kAwake, std::memory_order_relaxed);
  }

 private:
  void ring_sleeper(Word& peer);
  void wake_owner() noexcept;
  void open_socket();
  void wait_in_futex(Clock::time_point deadline) const;
  void wait_in_poll(Clock::time_point deadline, std::span<const pollfd> fds) const;

  Word private_word_;
  Word& word_;
  std::atomic<std::uint32_t> sleeps_{kAwake};  // as in word_, but no ringer resets it
  Fd socket_;  // polled by the owner; made before a state says kInPoll, and then never changed
  Fd sender_;  // for rings at peers that poll
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace torch_ring
