// Doorbell: wakes one sleeping rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "core/clock.h"
#include "core/fd.h"

struct pollfd;

namespace torch_ring {

/// An eventfd and a flag that says whether its owner sleeps on it. The flag lies in the sleeper's
/// shared memory, or in private memory if only threads of this process ring.
///
/// No wake-up is lost: the sleeper stores `asleep` and then loads the data once more; a ringer
/// stores the data and then loads `asleep`. All four are sequentially consistent, so at least one
/// of the two sees the other's store.
class Doorbell {
 public:
  Doorbell() = default;
  Doorbell(Fd event_fd, std::atomic<std::uint32_t>* asleep)
      : event_fd_(std::move(event_fd)), asleep_(asleep) {}

  /// A new non-blocking eventfd. Throws Error(kInternal).
  static Fd make_event_fd();

  /// Wakes the sleeper if there is one. Call after a seq_cst store of the data that it waits for.
  /// Thread: any. Blocking: no.
  void ring() const noexcept {
    if (asleep_->load(std::memory_order_seq_cst) != 0) ring_always();
  }
  void ring_always() const noexcept;

  /// Sleeps until the doorbell rings, until one of `fds` (at most 15) is ready, or until
  /// `deadline`; not at all if ready() holds.
  /// Thread: only the owner, one at a time. Blocking: until `deadline`.
  template <class Ready>
  void sleep(Ready&& ready, Clock::time_point deadline, std::span<const pollfd> fds = {}) const {
    asleep_->store(1, std::memory_order_seq_cst);
    if (!ready()) poll_until(deadline, fds);
    asleep_->store(0, std::memory_order_relaxed);
  }

 private:
  void poll_until(Clock::time_point deadline, std::span<const pollfd> fds) const;

  Fd event_fd_;
  std::atomic<std::uint32_t>* asleep_ = nullptr;
};

}  // namespace torch_ring
