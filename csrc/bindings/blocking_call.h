// SPDX-License-Identifier: Apache-2.0
// CountedCall and BlockingCall: the part of a call from Python that runs without the GIL.
#pragma once

#include <Python.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace torch_ring {

/// Releases the GIL for its lifetime. Thread: any, with the GIL.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

/// Counts calls that run without the GIL. When the interpreter ends, threads that wait for the GIL
/// are ended by pthread_exit(), which must not happen below frames of C++: it would call
/// std::terminate(). So the code that ends the interpreter first waits until all calls have
/// returned to Python.
///
/// Thread: any.
class CountedCall {
 public:
  CountedCall() { running_.fetch_add(1); }
  ~CountedCall() { running_.fetch_sub(1); }
  CountedCall(const CountedCall&) = delete;
  CountedCall& operator=(const CountedCall&) = delete;

  /// Waits, without the GIL, until no thread is in such a call, for `patience` at most. Returns
  /// whether it has succeeded. Thread: with the GIL.
  static bool await_all(std::chrono::milliseconds patience) {
    if (running_.load() == 0) return true;
    const WithoutGil no_gil;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (running_.load() > 0) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // The threads take the GIL in turn, and still have to raise their errors.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return true;
  }

  /// In a forked child, which lacks the parent's other threads.
  static void forget_all() { running_.store(0); }

 private:
  static inline std::atomic<int> running_{0};
};

/// Releases the GIL for its lifetime, and counts the call.
///
/// Thread: any, with the GIL.
class BlockingCall {
 public:
  BlockingCall() = default;
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;

 private:
  CountedCall counted_;  // the first member: it counts until the GIL is back
  WithoutGil no_gil_;
};

}  // namespace torch_ring
