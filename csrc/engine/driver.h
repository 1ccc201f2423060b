// SPDX-License-Identifier: Apache-2.0
// Driver: the state and the steps of the progress thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collective/communicator.h"
#include "core/config.h"
#include "engine/agreement.h"
#include "engine/device.h"
#include "engine/executor.h"
#include "engine/request_queue.h"
#include "engine/watchdog.h"

namespace torch_ring {

/// The driver makes progress: it announces works to the other ranks, completes rounds, and runs the
/// agreed works.
///
///   RequestQueue -> outbox_ -> pending_ (announced) -> done
///
/// Thread: the progress thread, as ProgressRole hands the driver to no other thread. So the driver
/// needs no mutex of its own. It locks the queue's mutex only briefly, and never during I/O.
class Driver {
 public:
  using Lock = RequestQueue::Lock;
  using Log = std::function<void(const std::string&)>;
  /// Called now and then while a thread waits. Its exception ends the wait, not the work.
  using Interrupt = std::function<void()>;

  /// The driver's engine. The progress thread calls it, without the lock except for completed().
  class Callbacks {
   public:
    /// A work is done, or has failed: threads may wait for it. With the lock.
    virtual void completed(const Lock& lock) = 0;

    /// `busy`: enqueued work is pending. Idle is reported only while no thread can launch.
    virtual void set_device_busy(bool busy) = 0;

    /// Whether the engine's thread must stop: another thread can make progress, or none should.
    virtual bool should_yield() = 0;

    /// Calls the interrupt, for example a signal handler. The driver's state is consistent here, so
    /// the interrupt may wait for another work, and so make progress itself, or close the engine.
    virtual void pause(const Interrupt& interrupt) = 0;

   protected:
    ~Callbacks() = default;
  };

  struct Options {
    EngineConfig config;
    std::vector<std::string> labels;   // by rank
    std::shared_ptr<WaitGraph> waits;  // may be null
    Log log;                           // takes a warning
    /// Whether a thread that has submitted nothing yet may do so. Empty: no thread may.
    std::function<bool()> others_may_submit;
    DeviceExecutor::Make make_device;
    /// Of the process; null: no other set uses its devices.
    std::shared_ptr<LaunchOrder> launch_order = nullptr;
    std::uint64_t set = 0;  // the process set's number
  };

  /// The interval at which a waiting thread reads the clock and lets its caller handle signals.
  static constexpr std::chrono::milliseconds kPollInterval{50};

  Driver(HostCommunicator& communicator, const Abort& abort, Watchdog& watchdog,
         RequestQueue& queue, Callbacks& callbacks, Options options);

  /// Moves the queue's works to the outbox.
  void take_submitted(const Lock& lock) { queue_.take(lock, outbox_); }

  /// Makes progress until `target` is done. Without a target: until there is nothing to do, or
  /// should_yield() holds.
  /// Blocking. Errors: fatal ones (the ranks are out of step then); those of pause().
  void make_progress(const Work* target, const Interrupt& interrupt);

  /// The number of rounds that this rank has completed, with their works. Thread: any.
  std::uint64_t rounds() const { return round_number() - 1; }

  /// Whether nothing is in the outbox or pending.
  bool idle() const { return outbox_.empty() && pending_.empty(); }

  /// Fails the queue's works and the driver's.
  void fail_all(const Lock& lock, const Error& cause);

  /// Moves this rank's tensors in shared memory to private memory if other ranks may still write to
  /// them. Call it before fail_all(), after which they belong to the program.
  void isolate_buffers() noexcept;

  /// Asks the device whether enqueued work is pending, and tells the engine. Errors: the device's.
  void poll_device() {
    if (device_.exists()) device_.poll([&](bool busy) { callbacks_.set_device_busy(busy); });
  }

  /// Ends enqueued work that waits for other ranks. Nothing can be enqueued afterwards.
  void abort_device() noexcept { device_.abort(); }

  /// Frees the device.
  void reset_device() { device_.reset(); }

  /// For launches. Thread: any, as DeviceExecutor says.
  DeviceExecutor& device() { return device_; }

 private:
  struct Pending {
    std::shared_ptr<Work> work;
    Clock::time_point warned{};  // the time of its last stall warning
  };

  /// Agreed works to run, with null in place of this rank's where it has joined.
  struct Batch {
    std::vector<Job> jobs;
    std::vector<std::shared_ptr<Work>> works;
    std::list<StandIn> stand_ins;
  };

  std::uint64_t round_number() const { return round_number_.load(std::memory_order_relaxed); }
  bool is_blocked(Clock::duration waited);
  void announce_outbox(bool blocked);
  bool round_is_complete() { return round_open_ && board_.complete(); }
  void finish_round();
  void write_down(Work& work, const Decision& decision);
  void settle(const Round& round);
  void run_round(const Round& round);
  void check_place(std::span<const Decision* const> decisions);
  void run_on_device(const Round& round, std::span<const Decision* const> decisions);
  const Fingerprint& fingerprint_of(const Decision& decision) const;
  void add(Batch& batch, const Decision& decision, Buffers& buffers);
  bool run_unanimous(const Round& round);
  void reset_numbering();
  void complete(Work& work);
  bool finish(Work& work);
  void end(Work& work);
  void fail(std::map<std::string, Pending>::iterator pending, const Error& cause);
  void fail(Work& work, const Error& cause);
  static void release_tensors(Work& work);
  void end_group(const std::string& group, const Error& cause);
  void note_progress(const Round& round, Clock::time_point now);
  void check_stalls();
  void ask(std::span<const int> late);
  void warn(std::span<Pending* const> stalled, Clock::time_point now);
  std::string timeout_text(const Request& request) const;
  Clock::time_point last_progress(const Work& work) const;
  std::vector<int> late_ranks(const Work& work) const;
  std::string describe(std::span<const int> late) const;

  HostCommunicator& communicator_;
  Board& board_;
  const Abort& abort_;
  Watchdog& watchdog_;
  RequestQueue& queue_;
  Callbacks& callbacks_;
  const EngineConfig config_;
  const std::vector<std::string> labels_;
  const std::shared_ptr<WaitGraph> waits_;
  const Log log_;
  const std::function<bool()> others_may_submit_;
  const std::shared_ptr<LaunchOrder> launch_order_;
  const std::uint64_t set_;

  Agreement agreement_;
  HostBuffers host_buffers_;
  Executor executor_;
  DeviceExecutor device_;
  EntryWriter entry_;
  Bytes fingerprint_;                         // of the request in announce_outbox()
  std::deque<std::shared_ptr<Work>> outbox_;  // to be announced
  std::map<std::string, Pending> pending_;    // announced, by key
  decltype(pending_)::node_type spare_;       // of the last round of one work, for the next one
  bool round_open_ = false;                   // this rank has posted, but not seen all entries yet
  // Of the next round, from 1. Only the progress thread stores it; it orders nothing for other
  // threads.
  std::atomic<std::uint64_t> round_number_{1};
  std::uint64_t decided_ = 0;  // operations, mismatches too: the same on all ranks
  std::optional<Clock::time_point> waits_since_;  // for the open round; none: it has not waited
  Clock::time_point agreed_;                      // when the last round was complete
  std::chrono::nanoseconds lag_{0};               // how long this rank waited for it
  bool answered_ = true;                          // ... and its entry there was empty
  // Of the last round: the operations that this rank waited for, by number, each with the ranks
  // that may have been last (empty: any).
  std::vector<std::pair<std::uint64_t, std::vector<int>>> unsettled_;
  // Of the last round: the notable wait for operations that this rank had announced earlier, and
  // the ranks that may have been last.
  struct {
    std::chrono::nanoseconds lag{0};
    std::vector<int> candidates;
  } awaited_;
  std::uint32_t notable_us_ = 0;  // of the last round: the longest notable wait, for the next post
  Clock::time_point idle_since_;  // the end of the last round that left something pending
  Lateness lateness_;
  LongWait wait_;                      // for the round's other entries
  Clock::time_point last_submission_;  // of an announced work
  // By rank: the last time when it announced something while other requests stayed undecided. The
  // epoch if it has not done so since the oldest of these was submitted.
  std::vector<Clock::time_point> progress_;
  Clock::time_point last_check_;  // of stalls
};

}  // namespace torch_ring
