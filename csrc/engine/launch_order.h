// LaunchOrder: the order in which the process sets of a process enqueue work on its devices.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective/communicator.h"
#include "core/abort.h"
#include "core/clock.h"

namespace torch_ring {

/// A device may run one operation at a time, in the order of enqueueing. So if rank 0 enqueues an
/// operation of set A before one of set B, and rank 1 the other way round, each device waits for
/// ever for the other one. Every rank has therefore to enqueue the operations of all of its sets in
/// one order. This is D. Skeen's atomic multicast (K. Birman, T. Joseph, "Reliable communication in
/// the presence of failures", ACM TOCS 5(1), 1987), with the clocks of L. Lamport:
///
///   1. When a set has decided a round with works on a device, each member takes a *place*, at a
///      time after all that it knows.
///   2. The members exchange these times. The latest of them is the place's on every member, which
///      puts its own clock there.
///   3. A member enqueues the works in its turn: when no other place in this process is earlier, by
///      (time, number of the set), settled or not. Its place is free when they are enqueued.
///
/// One order: a rank enqueues in the order of settled (time, set). A place that is taken later is
/// later, as the clock has passed every settled time; one that is not settled yet only moves back.
/// So the orders of all ranks are parts of one, in which nothing runs in a circle, however the sets
/// overlap. On the devices, the first operation that has not run is the next one on each of its
/// ranks, and runs.
///
/// No deadlock on the hosts: a place waits for earlier places alone. Take the earliest settled one
/// that never gets its turn. An unsettled place is before it, on some rank, so a member of that
/// place's set has not given a time yet. All members have posted to that round, so that member's
/// engine comes to it by itself, unless it is stuck with an earlier round of its set. But that
/// round's time is earlier still, so it gets its turn. What ranks do together in their turn, making
/// a communicator or connections of NCCL, therefore ends as well: all come to it. This is why a
/// time is given for decided rounds alone: a rank that has announced a request may wait for others
/// that submit theirs only after an operation of another set.
///
/// One object serves all sets of a process. While there is one set of several ranks, none takes a
/// place, and no time is exchanged. Sets number their rounds and keep their order themselves.
///
/// Thread: any. Blocking: Place::wait().
class LaunchOrder {
 public:
  LaunchOrder() = default;
  LaunchOrder(const LaunchOrder&) = delete;
  LaunchOrder& operator=(const LaunchOrder&) = delete;

  /// From now on several sets use the devices: this rank's entries say so, and a round in which a
  /// rank does is ordered by all members. Call it on all ranks of the world before they agree, by
  /// an operation of the world, to make the second set. Then no round of the world that all have
  /// begun without it can meet one of that set: on each rank it was enqueued before that agreement
  /// ended.
  void share() noexcept { is_shared_.store(true, std::memory_order_release); }
  bool is_shared() const noexcept { return is_shared_.load(std::memory_order_acquire); }

  /// A set's place, from its round's decision until its works are enqueued. It is given up where
  /// the set fails, so that it holds up nobody.
  /// Thread: the progress thread of the set's engine, which has one place at a time.
  class Place {
   public:
    /// `set`: its number, the same on all members. `name`: the set as errors call it.
    Place(LaunchOrder& order, std::uint64_t set, std::string name);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    /// Exchanges the members' times. Collective over `host`'s ranks. Errors: the communicator's.
    void settle(Communicator& host);

    /// Puts the place to its final time, which no member's exceeds.
    void settle(std::uint64_t time);

    /// Waits for this set's turn.
    /// Blocking. Errors: the cause of `abort`; Error(kTimeout) that names the set in front, if that
    /// has been the same one for `timeout`.
    void wait(const Abort& abort, Clock::duration timeout) const;

    std::uint64_t time() const { return key_.first; }

   private:
    LaunchOrder& order_;
    std::pair<std::uint64_t, std::uint64_t> key_;
  };

 private:
  // Releases what happened before share() to ranks' posts: the flag is read before each.
  std::atomic<bool> is_shared_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::uint64_t clock_ = 0;  // not before any time that was given or settled here
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::string> places_;  // (time, set): its name
};

/// "the process set of rank 0, rank 2", of its ranks' labels.
std::string set_name(std::span<const std::string> labels);

}  // namespace torch_ring
