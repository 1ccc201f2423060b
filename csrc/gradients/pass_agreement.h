// PassAgreement: the agreement at the end of a backward pass, which survives an interrupt.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "engine/engine.h"

namespace torch_ring {

/// The numbered agreements of a process set's optimizers. At the end of a backward pass the ranks
/// gather reports of their gradients; then they reduce the gradients that any rank has, and the
/// pass has ended.
///
/// A signal handler may raise an exception meanwhile (Ctrl-C). During the gathering it only ends
/// the wait: this rank's report is on its way, and its next pass continues from there with the
/// gradients that it has by then. During the reduction the exception is deferred to the end
/// (DenseFinalizer), which is near, because all ranks have agreed. Where it cannot be deferred, the
/// next pass ends the job with an error on all ranks.
///
/// Thread: the one that runs backward(), but is_ending_elsewhere(): any. Callers do not hold the
/// GIL in gather(). Errors: the engine's; Error(kInternal) if the pass before was interrupted
/// during its reduction.
class PassAgreement {
 public:
  /// The number of the next agreement, or of the one under way: a part of the operations' names.
  std::uint64_t number() const { return number_; }

  /// Returns the reports of all ranks that have not joined, in the order of ranks. Sends `report`,
  /// unless an interrupted pass has sent one.
  std::string gather(Engine& engine, const std::string& report, const Engine::Interrupt& interrupt);

  /// Whether a report of an unfinished pass is on its way.
  bool is_open() const { return open_ != nullptr; }

  /// The ranks begin to reduce the agreed gradients.
  void begin_reduction() { reducing_ = true; }

  /// Whether the reduction has not finished. At the beginning of a pass: the one before was
  /// interrupted there.
  bool is_reducing() const { return reducing_; }

  /// The gradients are reduced: the next agreement is another one.
  void finish() { restart(number_ + 1); }

  /// Makes `number` the next agreement, and drops the one under way.
  void restart(std::uint64_t number);

  /// Claims the end of a pass for the calling thread; returns false if another thread has it.
  bool begin_ending() {
    std::thread::id before;
    return ending_.compare_exchange_strong(before, std::this_thread::get_id()) ||
           before == std::this_thread::get_id();  // an interrupt kept it from stop_ending()
  }
  void stop_ending() { ending_ = std::thread::id(); }

  /// Whether another thread is ending a pass: no gradient may arrive now.
  bool is_ending_elsewhere() const {
    const std::thread::id thread = ending_.load(std::memory_order_relaxed);
    return thread != std::thread::id() && thread != std::this_thread::get_id();
  }

 private:
  /// Shared with the request, which stays in flight if the wait is interrupted.
  struct Reports {
    std::string mine;
    std::string all;
  };

  std::uint64_t number_ = 0;
  std::shared_ptr<Work> open_;        // the agreement under way
  std::shared_ptr<Reports> reports_;  // its reports
  bool reducing_ = false;
  std::atomic<std::thread::id> ending_{};  // the thread that ends a pass; guards no other data
};

}  // namespace torch_ring
