// SPDX-License-Identifier: Apache-2.0
// Device: an accelerator, for the engine. DeviceExecutor makes one and lets one thread at a time
// use it: for jobs, launches, polls.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective/communicator.h"
#include "core/abort.h"
#include "core/clock.h"
#include "engine/executor.h"

namespace torch_ring {

/// The order in which the process sets of a process enqueue work on its devices. A device may run
/// one operation at a time, in the order of enqueueing. So if rank 0 enqueues an operation of set A
/// before one of set B, and rank 1 the other way round, each device waits for ever for the other
/// one. Therefore every rank must enqueue the operations of all of its sets in one order. This is
/// D. Skeen's atomic multicast (K. Birman, T. Joseph, "Reliable communication in the presence of
/// failures", ACM TOCS 5(1), 1987), with the clocks of L. Lamport:
///
///   1. When a set has decided a round with works on a device, each member takes a *place*, at a
///      time later than all that it knows.
///   2. The members exchange these times. Every member moves its place, and its own clock, to the
///      latest of them.
///   3. A member enqueues the works in its turn: when no other place in this process, settled or
///      not, is earlier by (time, number of the set). Then it gives up its place.
///
/// One order: a rank enqueues in the order of settled (time, set). A new place has a later time
/// than every settled one, because the clock has passed these; an unsettled place only moves to
/// later times. So the orders of all ranks are parts of one total order without cycles, however the
/// sets overlap. The first operation in this order that has not run is the next one on each of its
/// devices, and runs.
///
/// No deadlock on the hosts: a place waits only for earlier places. Take the earliest settled place
/// that never gets its turn. On some rank an unsettled place precedes it, so a member of that
/// place's set has not sent its time yet. All members have posted to that round, so that member's
/// engine reaches it by itself, unless it is stuck in an earlier round of its set. But that round's
/// time is earlier still, so it gets its turn: a contradiction. The ranks also make a communicator,
/// or connections of NCCL, together in their turn; this ends as well, because all of them reach it.
/// Only decided rounds get a time, because a rank that has announced a request may wait for others
/// that submit theirs only after an operation of another set.
///
/// One object serves all sets of a process. While only one set has several ranks, no set takes a
/// place, and no times are exchanged. Sets number their rounds and keep their order themselves.
///
/// Thread: any. Blocking: Place::wait().
class LaunchOrder {
 public:
  LaunchOrder() = default;
  LaunchOrder(const LaunchOrder&) = delete;
  LaunchOrder& operator=(const LaunchOrder&) = delete;

  /// From now on several sets use the devices: this rank's entries say so, and all members order a
  /// round in which any entry does. Call it on all ranks of the world before they agree, by an
  /// operation of the world, to make the second set. Then no unordered round of the world can meet
  /// one of that set: on each rank it was enqueued before that agreement ended.
  void share() noexcept { is_shared_.store(true, std::memory_order_release); }
  bool is_shared() const noexcept { return is_shared_.load(std::memory_order_acquire); }

  /// A set's place, from its round's decision until its works are enqueued. A failing set gives up
  /// its place, so that it delays no other set.
  /// Thread: the progress thread of the set's engine, which has one place at a time.
  class Place {
   public:
    /// `set`: its number, the same on all members. `name`: the set's name in errors.
    Place(LaunchOrder& order, std::uint64_t set, std::string name);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    /// Exchanges the members' times. Collective over `host`'s ranks. Errors: the communicator's.
    void settle(Communicator& host);

    /// Moves the place to its final time, the maximum over the members.
    void settle(std::uint64_t time);

    /// Waits for this set's turn.
    /// Blocking. Errors: the cause of `abort`; Error(kTimeout) that names the set in front, if the
    /// same set has been there for `timeout`.
    void wait(const Abort& abort, Clock::duration timeout) const;

    std::uint64_t time() const { return key_.first; }

   private:
    LaunchOrder& order_;
    std::pair<std::uint64_t, std::uint64_t> key_;
  };

 private:
  // Read before each post, so that share() happens before every post with the flag.
  std::atomic<bool> is_shared_{false};

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::uint64_t clock_ = 0;  // at least every time that was sent or settled here
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::string> places_;  // (time, set): its name
};

/// "the process set of rank 0, rank 2", from its ranks' labels. `members`: Words::members.
std::string set_name(std::span<const std::string> labels, const std::string& members);

/// A mutex for a device, whose calls may take long: a wait for it has a deadline, and ends when the
/// job does. A thread that has passed may lock the engine's mutex (request_queue.h), not the other
/// way round.
/// Thread: any. Errors: none.
class DeviceGate {
  struct Leave {
    void operator()(DeviceGate* gate) const { gate->leave(); }
  };

 public:
  /// The right to use the device, as long as it lives. Null: another thread has it.
  using Pass = std::unique_ptr<DeviceGate, Leave>;

  Pass try_enter();

  /// Blocking: until no other thread has the pass, for `patience` at most.
  Pass enter(Clock::duration patience);

  /// The same, but no longer than until `abort` is raised.
  Pass enter(Clock::duration patience, const Abort& abort);

  /// How long a thread has had the pass; 0 if none has it.
  Clock::duration held_for();

 private:
  Pass take();
  void leave();

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  bool taken_ = false;
  Clock::time_point since_;  // of the last pass
};

/// A stream of an accelerator, the memory there, and a communicator whose work runs on the stream.
/// Thread: one at a time, except abort(). Blocking: use() while NCCL takes a call, abort() for some
/// seconds. Errors: of kind kPeerLost, kTimeout, kInternal.
class Device {
 public:
  virtual ~Device() = default;

  virtual Communicator& communicator() = 0;
  virtual Buffers& buffers() = 0;

  /// Calls `enqueue` while this device and its stream are the calling thread's current ones.
  virtual void use(const std::function<void()>& enqueue) = 0;

  /// Whether enqueued work is pending. Throws the error of failed work, and Error(kTimeout) if work
  /// has waited for other ranks for longer than EngineConfig::timeout.
  virtual bool busy() = 0;

  /// Ends enqueued work that waits for other ranks. Nothing can be enqueued afterwards. If a thread
  /// hangs in use(), another one may call this: the hanging call may wait for such work.
  virtual void abort() noexcept = 0;
};

/// The work that a launch enqueues (Engine::launch) on the device's stream.
using Enqueue = std::function<void(Communicator&, Buffers&)>;

/// Runs jobs on a device, and launches. It makes the device for the first job, so a rank without
/// tensors on a device needs neither NCCL nor the vendor's software.
///
/// The progress thread runs jobs and polls, any thread launches: a gate lets in one at a time. No
/// thread that waits for the gate may hold the GIL, which the freeing of tensors needs.
///
/// Thread: the progress thread, except enter(), exists() and use(). Errors: the executor's and the
/// device's.
class DeviceExecutor {
 public:
  /// Makes a device. Collective over `host`'s ranks. `type`: Fingerprint::device.
  /// Errors: of kind kInvalidArgument, the same on all ranks, if they cannot use the device
  /// together; otherwise Device's.
  using Make = std::function<std::unique_ptr<Device>(std::uint8_t type, Communicator& host,
                                                     const Abort& abort)>;

  /// `timeout`: also bounds the wait for another thread's use of the device.
  DeviceExecutor(Make make, std::size_t fusion_threshold_bytes, const Abort& abort,
                 std::chrono::milliseconds timeout)
      : make_(std::move(make)),
        fusion_threshold_bytes_(fusion_threshold_bytes),
        abort_(abort),
        timeout_(timeout) {}

  /// Makes the device, if there is none yet. Collective. Returns the error if the ranks cannot use
  /// one together; then no later call makes one.
  const std::optional<Error>& prepare(std::uint8_t type, Communicator& host, const Abort& abort) {
    if (device_ || unusable_) return unusable_;
    try {
      if (!make_) throw Error(ErrorKind::kInvalidArgument, "this engine has no devices");
      std::unique_ptr<Device> device = make_(type, host, abort);
      const DeviceGate::Pass pass = enter_or_throw();
      device_ = std::move(device);
      executor_.emplace(device_->communicator(), device_->buffers(), fusion_threshold_bytes_);
    } catch (const Error& error) {
      if (error.fatal()) throw;
      unusable_ = error;
    }
    return unusable_;
  }

  /// Lets the calling thread use the device until it drops the pass. Null when the job has ended,
  /// or when another thread has not left within the timeout. Thread: any. Blocking.
  DeviceGate::Pass enter() { return gate_.enter(timeout_, abort_); }

  /// The same, or throws the abort's cause, or Error(kTimeout).
  DeviceGate::Pass enter_or_throw() {
    DeviceGate::Pass pass = enter();
    if (pass) return pass;
    abort_.check();
    throw stuck();
  }

  /// Whether prepare() has made the device, and reset() has not freed it. Thread: the progress
  /// thread, or one with a pass.
  bool exists() const { return device_ != nullptr; }

  /// Calls `enqueue` on the device. Precondition: exists(), and the thread has a pass.
  void use(const Enqueue& enqueue) {
    device_->use([&] { enqueue(device_->communicator(), device_->buffers()); });
  }

  /// Precondition: exists(), and the thread has a pass.
  Buffers& buffers() { return device_->buffers(); }

  /// Enqueues the jobs, as Executor::run() does; then calls done(i) for all of them, because their
  /// end is one event. Precondition: prepare() has made the device.
  template <class Finish, class Done>
  void run(std::span<const Job> jobs, Finish&& finish, Done&& done) {
    const DeviceGate::Pass pass = enter_or_throw();
    device_->use([&] { executor_->run(jobs, finish); });
    for (std::size_t i = 0; i < jobs.size(); ++i) done(i);
  }

  /// Tells `report` whether enqueued work is pending, while no thread can enqueue more. Does
  /// nothing while another thread uses the device. Errors: the device's; Error(kTimeout) if that
  /// thread hangs.
  template <class Report>
  void poll(Report&& report) {
    if (!device_) return;
    if (const DeviceGate::Pass pass = gate_.try_enter()) {
      report(device_->busy());
    } else if (gate_.held_for() > timeout_ + kLeaving) {
      throw stuck();
    }
  }

  /// Ends enqueued work that waits for other ranks. Nothing can be enqueued afterwards.
  /// Precondition: the abort is raised.
  void abort() noexcept {
    // A thread inside sees the abort and leaves, unless it hangs: then the device's end frees it.
    const DeviceGate::Pass pass = gate_.enter(std::min<Clock::duration>(timeout_, kLeaving));
    if (device_) device_->abort();
  }

  /// Frees the device. If a thread hangs inside, the destructor frees it, after that thread has
  /// left.
  void reset() {
    const DeviceGate::Pass pass = gate_.enter(std::min<Clock::duration>(timeout_, kLeaving));
    if (!pass) return;
    executor_.reset();
    device_.reset();
  }

 private:
  // The longest time that a thread needs to leave the device after the abort.
  static constexpr std::chrono::milliseconds kLeaving{2000};

  Error stuck() const {
    return {ErrorKind::kTimeout,
            "a thread's call of the device has not returned within " + in_seconds(timeout_)};
  }

  const Make make_;
  const std::size_t fusion_threshold_bytes_;
  const Abort& abort_;
  const std::chrono::milliseconds timeout_;
  DeviceGate gate_;  // guards the members below; only the progress thread makes or frees the device
  std::unique_ptr<Device> device_;
  std::optional<Executor> executor_;
  std::optional<Error> unusable_;
};

}  // namespace torch_ring
