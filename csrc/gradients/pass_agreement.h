// SPDX-License-Identifier: Apache-2.0
// PassAgreement: the agreement at the end of a backward pass, which survives an interrupt.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/engine.h"
#include "gradients/report.h"

namespace torch_ring {

/// The numbered agreements of a process set's optimizers. At the end of a backward pass the ranks
/// gather reports of their gradients; then they reduce the gradients that any rank has, and the
/// pass has ended.
///
/// A signal handler may raise an exception meanwhile (Ctrl-C). During the gathering it only ends
/// the wait: this rank's report is on its way, and its next pass continues from there with the
/// gradients that it has by then. During the reduction the exception is deferred to the end
/// (PassEnd), which is near, because all ranks have agreed. Where it cannot be deferred, the
/// next pass ends the job with an error on all ranks.
///
/// A pass may also fail in the program, which catches the exception and goes on. What comes next is
/// the next batch, or the same one again, while the other ranks wait in this pass. So this rank's
/// next report says that it has given the pass up, and the job ends, unless all ranks have: then
/// none is ahead of another. If gradients had been sent, the job ends before others mix with them.
///
/// Thread: the one that runs backward(), but arrive(), give_up(), failure(), has_sent_in_vain() and
/// is_ending_elsewhere(): any. Callers do not hold the GIL in gather(). Errors: the engine's;
/// Error(kInternal) if the pass before was interrupted during its reduction.
class PassAgreement {
 public:
  static constexpr const char* kSentInVain =
      "a backward pass failed or was interrupted after part of its gradients had been sent, which "
      "only shutdown() and init() can mend";

  /// The number of the next agreement, or of the one under way: a part of the operations' names.
  std::uint64_t number() const { return number_; }

  /// Returns the reports of all ranks that have not joined, in the order of ranks. Sends `report`,
  /// unless an interrupted pass has sent one.
  PassReports gather(Engine& engine, const PassReport& report, const Engine::Interrupt& interrupt);

  /// Whether a report of an unfinished pass is on its way.
  bool is_open() const { return open_ != nullptr; }

  /// That report; null if there is none.
  std::shared_ptr<const PassReport> open_report() const;

  /// The ranks begin to reduce the agreed gradients.
  void begin_reduction() { reducing_ = true; }

  /// Whether the reduction has not finished. At the beginning of a pass: the one before was
  /// interrupted there.
  bool is_reducing() const { return reducing_; }

  /// The gradients are reduced: the next agreement is another one.
  void finish() { restart(number_ + 1); }

  /// Makes `number` the next agreement, and drops the one under way.
  void restart(std::uint64_t number);

  /// Claims the end of a pass, or a step, for the calling thread; returns false if another thread
  /// has it.
  bool begin_ending(bool of_step) {
    if (!of_step) arriving_.store(false, std::memory_order_relaxed);
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

  /// A gradient has arrived that the present pass averages.
  void arrive() { arriving_.store(true, std::memory_order_relaxed); }

  /// The present pass has failed. `why`: the program's exception; empty if there is none, or an
  /// interrupt, after which the next pass takes the place of this one. `sent`: whether gradients
  /// have been sent.
  void give_up(const std::string& why, bool sent);

  /// The error of a pass that this rank has given up since the last agreement; empty if none.
  std::string failure() const;

  /// Whether gradients of such a pass have been sent.
  bool has_sent_in_vain() const { return sent_in_vain_.load(std::memory_order_relaxed); }

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
  // Whether a gradient to average has arrived in a pass whose end has not begun. Guards no data.
  std::atomic<bool> arriving_{false};
  std::atomic<bool> sent_in_vain_{false};  // guards no other data
  mutable std::mutex mutex_;               // guards the member below
  std::string failure_;
};

}  // namespace torch_ring
