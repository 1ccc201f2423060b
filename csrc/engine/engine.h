// SPDX-License-Identifier: Apache-2.0
// Engine: the collectives of a rank, from their submission to their results.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cassert>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective/communicator.h"
#include "core/config.h"
#include "core/home_process.h"
#include "engine/driver.h"
#include "engine/request_queue.h"
#include "engine/watchdog.h"

namespace torch_ring {

/// The role of the progress thread, which gives access to the driver. At most one thread at a time
/// has the role. A thread takes it by making a Turn, and only a Turn gives access to the driver,
/// except for its device.
///
/// The progress thread *pauses* in an interrupt: it keeps the role, and the driver's state is
/// consistent, so it may take another turn inside its own.
///
/// Thread: any, with the lock, except pause(). Blocking: no.
class ProgressRole {
 public:
  using Lock = RequestQueue::Lock;

  /// The parameters are the driver's.
  template <class... Args>
  explicit ProgressRole(Args&&... args) : driver_(std::forward<Args>(args)...) {}
  ProgressRole(const ProgressRole&) = delete;
  ProgressRole& operator=(const ProgressRole&) = delete;

  bool is_taken(const Lock&) const { return taken_; }

  /// Whether the calling thread has the role.
  bool is_mine(const Lock&) const { return taken_ && thread_ == std::this_thread::get_id(); }

  /// Whether the calling thread has the role, and pauses.
  bool is_paused_here(const Lock& lock) const { return is_mine(lock) && paused_; }

  /// Whether the role is free while the driver has works left.
  bool is_needed(const Lock&) const { return !taken_ && !driver_.idle(); }

  /// The part of the driver that other threads use, too, to launch. Needs no lock.
  DeviceExecutor& device() { return driver_.device(); }

  /// Driver::rounds(). Needs no lock.
  std::uint64_t rounds() const { return driver_.rounds(); }

  /// Calls `interrupt` as a pause of this turn. Thread: the progress thread, without the lock.
  template <class Interrupt>
  void pause(Interrupt&& interrupt) {
    paused_ = true;
    interrupt();
    paused_ = false;
  }

  /// Gives the role away in a pause, and takes it back; another thread may have it in between.
  void lend(const Lock&) { taken_ = false; }
  void take_back(const Lock&) {
    taken_ = true;
    thread_ = std::this_thread::get_id();
    paused_ = true;
  }

  /// The calling thread's turn as the progress thread. The constructor and the destructor need the
  /// lock; the driver is used without it. The role must be free, or this thread's own in a pause.
  class Turn {
   public:
    Turn(ProgressRole& role, [[maybe_unused]] const Lock& lock)
        : role_(role), nested_(role.taken_) {
      assert(lock.owns_lock() && (!nested_ || role.is_paused_here(lock)));
      role_.taken_ = true;
      role_.thread_ = std::this_thread::get_id();
      role_.paused_ = false;
    }
    ~Turn() {
      role_.taken_ = role_.paused_ = nested_;
      if (!nested_) role_.thread_ = {};
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    Driver& driver() const { return role_.driver_; }

   private:
    ProgressRole& role_;
    const bool nested_;
  };

 private:
  Driver driver_;
  bool taken_ = false;
  std::thread::id thread_;  // the progress thread; no id while the role is free
  bool paused_ = false;  // only the progress thread reads and writes it, so pause() needs no lock
};

/// The engine queues requests, agrees on them with the other ranks, and runs them. One thread at a
/// time, the *progress thread*, makes progress (MPI's word): it posts entries, completes rounds and
/// runs collectives. A thread that waits for a result makes progress itself, because waking another
/// thread costs more than a small allreduce. The engine's own thread makes progress on requests
/// that nobody waits for.
///
///   RequestQueue   submitted works, names in flight, and the mutex     any thread
///   Driver         announced works, the agreement, the executors       the progress thread
///   DeviceExecutor the device, behind a gate: agreed jobs, launches    one thread at a time
///   Engine         the choice of the progress thread                   any thread
///
/// Thread: any. Blocking: wait(), submit_and_wait(), launch() and close() only.
/// Errors: a failed collective is its work's error. After a fatal one (Error::fatal()) every
/// pending and every later request fails with the same cause.
class Engine final : private Driver::Callbacks {
 public:
  using Log = Driver::Log;
  using Interrupt = Driver::Interrupt;

  struct Options {
    EngineConfig config;
    std::vector<std::string> labels;          // by rank
    ControlPlane* plane = nullptr;            // of the process; null in a world of one
    std::uint64_t set = 0;                    // the process set's number in the plane
    std::vector<int> members;                 // by rank: its rank in the world
    std::shared_ptr<WaitGraph> waits;         // of the set; may be null
    std::function<bool()> others_may_submit;  // see Driver::Options
    Log log;                                  // takes a warning; Thread: any
    DeviceExecutor::Make make_device;         // may be empty
    /// See Driver::Options.
    std::shared_ptr<LaunchOrder> launch_order = nullptr;
    Transport transport = Transport::kLocal;  // for the records
    /// Called with each request before it is queued, by the thread that submits it. May be empty.
    std::function<void(Request&)> follow = {};
  };

  /// `abort`: the Abort that the communicator's waits see.
  Engine(std::shared_ptr<HostCommunicator> communicator, std::shared_ptr<Abort> abort,
         Options options);
  ~Engine() { close(); }

  enum class Ending {
    kLeaves,   // this rank leaves, maybe alone: the others are told
    kRemoved,  // the set is removed on all ranks at once
  };
  /// Fails all pending and all later requests, and joins the thread. First it waits for the device,
  /// which may still write results, except in an interrupt. A second caller waits for the first.
  /// `why`: the reason for the others, see ControlPlane::leave().
  void close(Ending ending = Ending::kLeaves, std::string why = {});

  enum class Mode {
    kAsynchronous,  // the engine's thread starts it after the fusion window
    kBlocking,      // the caller is about to wait(): the engine's thread is not woken
  };
  /// Errors: Error(kInvalidArgument) when the name is in flight or reserved; the fatal cause.
  std::shared_ptr<Work> submit(Request request, Mode mode);

  /// Submits all requests, or none if one of them is refused. Errors: as above.
  std::vector<std::shared_ptr<Work>> submit(std::vector<Request> requests, Mode mode);

  /// Blocks until the work is done, and makes progress if no other thread does.
  /// Errors: the work's; the interrupt's.
  void wait(Work& work, const Interrupt& interrupt);

  /// Wakes the engine's thread to make progress if no other thread does: for works that were
  /// submitted in kBlocking mode, but that no thread waits for. Does nothing in a forked child,
  /// where the mutex may be locked for ever.
  void tend() {
    if (home_.is_here()) tend(queue_.lock());
  }

  /// submit() and wait() in one cheaper call, for operations that take microseconds.
  void submit_and_wait(Request request, const Interrupt& interrupt);

  /// Enqueues work on the set's device at once, without an agreement, because all ranks launch the
  /// same work in the same order. `enqueue` is called while the device and its stream are the
  /// thread's current ones; it must not launch or submit. The host waits for no other rank, only
  /// until this rank's earlier requests on the device are enqueued. So launches and agreed requests
  /// have one order on all ranks; if not, the result is a MismatchError, because an agreed request
  /// carries the number of earlier launches.
  /// `what`: for the records. `promised`: the watch (below) is not called.
  /// Thread: any that does not hold the GIL, which the freeing of tensors needs. Blocking: until
  /// the device has taken the work, bounded by the transfer timeout and by the job's end; before
  /// that as wait(), if there are such requests.
  /// Errors: the fatal cause; Error(kInternal) before the first agreed request on a device; the
  /// interrupt's. An error of `enqueue` ends the job.
  void launch(const Fingerprint& what, const Enqueue& enqueue, const Interrupt& interrupt = {},
              bool promised = false);

  /// The number of launches so far, modulo 2^32; none while a request on the device is not
  /// enqueued. Thread: any.
  std::optional<std::uint32_t> launches() {
    const Lock lock = queue_.lock();
    if (queue_.first_on_device(lock)) return std::nullopt;
    return queue_.launches(lock);
  }

  /// Notices whatever else the program does while it makes a series of launches.
  struct Watch {
    std::vector<std::thread::id> threads;
    std::function<void()> call;  // may launch
  };

  /// Calls the watch from now on before each launch, each request on a device, each request of its
  /// threads, and close(), on the thread that does so; in place of an earlier watch. Null: none.
  /// Thread: any.
  void set_watch(std::shared_ptr<const Watch> watch) {
    const std::scoped_lock lock(watch_mutex_);
    has_watch_.store(watch != nullptr, std::memory_order_release);
    watch_ = std::move(watch);
  }

  /// Ends the job on all ranks with this cause, or an earlier one, and throws it.
  [[noreturn]] void end(const Error& cause);

  /// The last operations of this rank, including those in flight (recorder.h). Thread: any; holds
  /// the queue's mutex while it copies 2000 records, well below a millisecond.
  std::vector<OperationRecord> records() {
    const Lock lock = queue_.lock();
    return queue_.recorder(lock).records();
  }

  /// The sums over all operations of this rank that have ended, and its rounds. Thread: any.
  OperationTotals totals() {
    const Lock lock = queue_.lock();
    OperationTotals totals = queue_.recorder(lock).totals();
    totals.rounds = role_.rounds();
    return totals;
  }

  /// Sends the record of every operation that ends from now on to `stream`, in place of an earlier
  /// stream; null: nowhere. Thread: any.
  void observe(std::shared_ptr<RecordStream> stream) {
    const Lock lock = queue_.lock();
    queue_.recorder(lock).observe(std::move(stream));
  }

  /// Throws the fatal cause, if there is one: then results that are still on a device are void.
  void check() const {
    if (!closed_) abort_->check();
  }

 private:
  using Lock = RequestQueue::Lock;

  std::shared_ptr<Work> try_launch(const Fingerprint& what, const Enqueue& enqueue, bool& begun);
  void call_watch(bool on_device);
  void await_close(Lock& lock);
  [[noreturn]] void end(const Watchdog::Cause& cause);
  void enqueue(const Lock& lock, std::span<const std::shared_ptr<Work>> works, Mode mode);
  void require_world() const;
  void require_open(const Lock& lock) const;
  [[noreturn]] void refuse(const Error& cause) const;
  void wait(Lock& lock, Work& work, const Interrupt& interrupt);
  void run();  // the engine's thread
  /// Makes this the progress thread until `target` is done. Without a target: until there is
  /// nothing to do, or a waiting thread can make progress instead. The lock is released meanwhile.
  void progress_exclusively(Lock& lock, const Work* target, const Interrupt& interrupt);
  void tend(const Lock& lock);
  bool needs_progress(const Lock& lock) const;
  void fail(const Watchdog::Cause& cause);
  void fail_all(const Lock& lock, Driver& driver);

  // Callbacks of the driver: by the progress thread.
  void completed(const Lock& lock) override;
  void set_device_busy(bool busy) override;
  bool should_yield() override;
  void pause(const Interrupt& interrupt) override;

  const std::shared_ptr<HostCommunicator> communicator_;
  const std::shared_ptr<Abort> abort_;
  const EngineConfig config_;
  const std::function<void(Request&)> follow_;
  const std::string name_;  // "rank 2"
  const HomeProcess home_;
  Board& board_;

  RequestQueue queue_;      // its mutex also guards the role and the next seven members
  std::mutex watch_mutex_;  // guards watch_; held while no other lock is taken
  std::shared_ptr<const Watch> watch_;
  // A hint: a request in another thread races with set_watch().
  std::atomic<bool> has_watch_{false};
  // Signals that a work is done, or that another thread must check the queue or the role.
  std::condition_variable changed_;
  int waiters_ = 0;           // threads that wait for the progress thread
  bool device_busy_ = false;  // enqueued work has not run yet
  bool ended_ = false;        // works have failed, and the device is aborted, after an abort
  bool is_leaving_ = false;   // close() has begun
  bool closing_ = false;      // ... and waits for the device no more
  bool is_closed_ = false;    // close() has ended
  // The engine was closed in peace: all enqueued work has run, so no result is void. close() stores
  // this once, after it has raised the abort; check() loads it before the abort. A check() on
  // another thread during close() may see only the abort, and throws.
  std::atomic<bool> closed_{false};

  Watchdog watchdog_;
  ProgressRole role_;
  std::thread thread_;  // the last member: the thread uses all of the above
};

}  // namespace torch_ring
