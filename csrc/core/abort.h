// SPDX-License-Identifier: Apache-2.0
// Abort: the cause that ends the job on this rank.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "core/error.h"

namespace torch_ring {

/// The first cause that a thread notices (the watchdog, or a wait past its deadline), recorded
/// once. Every wait loop checks it.
/// Thread: any. Blocking: no.
class Abort {
 public:
  /// Records `cause` if none is recorded yet. Returns whether it was the first.
  bool raise(Error cause) {
    const std::scoped_lock lock(mutex_);
    if (cause_) return false;
    cause_.emplace(std::move(cause));
    // Releases cause_ to raised(). seq_cst, because the next call may ring a Doorbell for it.
    raised_.store(true, std::memory_order_seq_cst);
    return true;
  }

  /// seq_cst, because a thread loads it before it sleeps (Doorbell).
  bool raised() const noexcept { return raised_.load(std::memory_order_seq_cst); }

  /// Throws the cause if there is one.
  void check() const {
    if (raised()) throw *cause_;  // written once, before the store that raised() saw
  }

 private:
  std::mutex mutex_;
  std::optional<Error> cause_;
  std::atomic<bool> raised_{false};
};

}  // namespace torch_ring
