// BlockingCall: the part of a call from Python that runs without the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace torch_ring {

/// Releases the GIL for its lifetime, and counts it. When the interpreter ends, threads that wait
/// for the GIL are ended by pthread_exit(), which must not happen below frames of C++: it would
/// call std::terminate(). So whoever ends the interpreter first waits until all calls have
/// returned to Python.
///
/// Thread: any, with the GIL.
class BlockingCall {
 public:
  BlockingCall() = default;
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;

  /// Waits, without the GIL, until no thread is in such a call. Returns whether that is so, after
  /// `patience` at most.
  static bool await_all(std::chrono::milliseconds patience) {
    if (Counted::running.load() == 0) return true;
    const pybind11::gil_scoped_release no_gil;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (Counted::running.load() > 0) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // They have the GIL in turn, and have still to raise their errors.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return true;
  }

  /// In a forked child, which lacks the parent's other threads.
  static void forget_all() { Counted::running.store(0); }

 private:
  struct Counted {
    Counted() { running.fetch_add(1); }
    ~Counted() { running.fetch_sub(1); }
    static inline std::atomic<int> running{0};
  };
  Counted counted_;  // the first member: it counts until the GIL is back
  pybind11::gil_scoped_release no_gil_;
};

}  // namespace torch_ring
