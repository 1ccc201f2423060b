// SPDX-License-Identifier: Apache-2.0
// EngineConfig: the settings of an engine, read from the environment by torch_ring/config/.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>

#include "core/clock.h"

namespace torch_ring {

/// The words of errors: the names by which the program calls things. By default those of a world of
/// torch_ring's own functions; torch_ring/config/words.py has the others.
struct Words {
  std::string whole = "world";          // the ranks of the engine, in "this world has ended"
  std::string members = "process set";  // the same, in "the process set of rank 0, rank 1"
  std::string leave = "shutdown()";     // the call by which a rank leaves
  std::string remedy = "Call shutdown() and init(), or exit";  // after the end
  std::string threads = "give them names";                     // to threads that use one engine

  /// Calls `visit` with the name of each word in Python, and the word.
  template <class Visit>
  void for_each(Visit&& visit) {
    visit("whole", whole);
    visit("members", members);
    visit("leave", leave);
    visit("remedy", remedy);
    visit("threads", threads);
  }
};

struct EngineConfig {
  std::chrono::milliseconds timeout{0};             // a rank that is later is an error; 0: never
  std::string timeout_name = "TORCH_RING_TIMEOUT";  // its name in errors
  std::chrono::milliseconds stall_warning{60'000};  // 0: never
  std::chrono::microseconds fusion_window{1'000};   // how long requests are collected
  std::size_t fusion_threshold_bytes = 64u << 20;   // requests fused into one collective
  // How long ranks that wait for different operations wait for submissions of their other threads,
  // before this is a mismatch.
  std::chrono::milliseconds other_threads_grace{10'000};
  std::size_t arena_bytes = 0;  // a rank's address space for buckets; 0: the host's memory
  int width = 1;                // TCP connections between two ranks
  int checksum = 0;             // 1: data between hosts carry checksums
  std::string tls = "0";        // 1: connections between hosts are encrypted; cpu: but not NCCL's
  std::string nccl_library;     // its path; empty: that of torch, or of the system
  Words words;

  /// Calls `visit` with the name of each setting in torch_ring.config.Config, and its field. Times
  /// are seconds there.
  template <class Visit>
  void for_each(Visit&& visit) {
    visit("timeout_s", timeout);
    visit("timeout_name", timeout_name);
    visit("stall_warning_s", stall_warning);
    visit("fusion_window_s", fusion_window);
    visit("fusion_threshold_bytes", fusion_threshold_bytes);
    visit("width", width);
    visit("checksum", checksum);
    visit("tls", tls);
    visit("nccl_library", nccl_library);
    visit("words", words);
  }

  /// The timeout in errors: "300 s (TORCH_RING_TIMEOUT)".
  std::string timeout_text() const { return in_seconds(timeout) + " (" + timeout_name + ")"; }

  /// The longest standstill of a transfer that has begun. All ranks take part in it, or are about
  /// to, so a live rank that makes no progress is stuck, not late.
  std::chrono::milliseconds transfer_timeout() const {
    return timeout.count() > 0 ? timeout : std::chrono::minutes(5);
  }

  /// The grace for other threads, but ahead of the timeout, whose error does not tell that the
  /// ranks disagree.
  std::chrono::milliseconds grace_before_timeout() const {
    return timeout.count() > 0 ? std::min(other_threads_grace, timeout * 3 / 4)
                               : other_threads_grace;
  }

  /// How long a rank waits before it tells the others the ranks that it waits for (WaitGraph): well
  /// before an error blames one of them.
  std::chrono::milliseconds patience() const {
    std::chrono::milliseconds first = std::chrono::minutes(1);
    if (timeout.count() > 0) first = std::min(first, timeout);
    if (stall_warning.count() > 0) first = std::min(first, stall_warning);
    return first / 4;
  }
};

}  // namespace torch_ring
