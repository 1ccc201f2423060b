// SPDX-License-Identifier: Apache-2.0
// HomeProcess: the process in which an object was made.
#pragma once

#include <atomic>

namespace torch_ring {

/// The forks by which this process descends from the one that has loaded this library.
extern std::atomic<unsigned> forks_so_far;

/// The process in which an object was made. A forked child has a copy of the object, but not the
/// threads and locks that it needs. Asking costs no system call, as getpid() does.
/// Thread: any.
class HomeProcess {
 public:
  bool is_here() const noexcept { return forks_so_far.load(std::memory_order_relaxed) == forks_; }

 private:
  unsigned forks_ = forks_so_far.load(std::memory_order_relaxed);
};

}  // namespace torch_ring
