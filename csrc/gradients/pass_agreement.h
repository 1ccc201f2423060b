// PassAgreement: the agreement at the end of a backward pass, which an interrupt does not lose.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "engine/engine.h"

namespace torch_ring {

/// The numbered agreements of a process set's optimizers. At the end of a backward pass the ranks
/// gather reports of their gradients; then they reduce what any rank has, and the pass has ended.
///
/// A signal handler may raise an exception meanwhile (Ctrl-C). While the reports are gathered, it
/// ends the wait and no more: this rank's report is on its way, and its next pass goes on from
/// there with the gradients that it has by then. While gradients are reduced, it waits for the end
/// (DenseFinalizer), which is near, because all ranks have agreed. Where it cannot wait, the
/// next pass ends the job with an error on all ranks.
///
/// Thread: the one that runs backward(), but is_ending_elsewhere(): any. Callers do not hold the
/// GIL in gather(). Errors: the engine's; Error(kInternal) if the pass before was interrupted while
/// gradients were reduced.
class PassAgreement {
 public:
  /// The number of the next agreement, or of the one under way. A part of the operations' names.
  std::uint64_t number() const { return number_; }

  /// Returns the reports of all ranks that have not joined, in the order of ranks. Sends `report`,
  /// unless an interrupted pass has sent one.
  std::string gather(Engine& engine, const std::string& report, const Engine::Interrupt& interrupt);

  /// Whether a report is on its way whose pass has not ended.
  bool is_open() const { return open_ != nullptr; }

  /// The ranks begin to reduce what they have agreed on.
  void begin_reduction() { reducing_ = true; }

  /// Whether they have not finished: if a pass begins, the one before was interrupted there.
  bool is_reducing() const { return reducing_; }

  /// The gradients are reduced: the next agreement is another one.
  void finish() { restart(number_ + 1); }

  /// The next agreement is `number`, whatever was under way.
  void restart(std::uint64_t number);

  /// Takes the end of a pass for the calling thread; returns whether no other thread has it.
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
