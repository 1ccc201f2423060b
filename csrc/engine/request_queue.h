// SPDX-License-Identifier: Apache-2.0
// RequestQueue: the submitted works that no progress thread has taken yet, and the names in flight.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/recorder.h"
#include "engine/request.h"

namespace torch_ring {

/// The part of an engine that every thread uses. A work enters by add(), leaves the queue by
/// take(), and keeps its name until complete().
///
/// The queue owns the engine's only mutex. Whether to wake a thread depends on the queue and on the
/// progress thread, so one mutex guards both, and a small allreduce locks it three times.
///
/// Thread: any. Blocking: only for the mutex, which nobody holds during I/O.
class RequestQueue {
 public:
  /// The mutex, locked. A function with a parameter of this type needs it locked; only lock() makes
  /// one.
  class Lock : public std::unique_lock<std::mutex> {
    friend class RequestQueue;
    explicit Lock(std::mutex& mutex) : std::unique_lock<std::mutex>(mutex) {}
  };

  /// `rank_name`: "rank 2", the beginning of errors.
  /// `set`, `transport`: for the records of its operations.
  explicit RequestQueue(std::string rank_name, std::uint64_t set = 0,
                        Transport transport = Transport::kLocal)
      : rank_name_(std::move(rank_name)), recorder_(set, transport) {}

  Lock lock() { return Lock(mutex_); }

  /// A work for add(). Errors: Error(kInvalidArgument) if the name is reserved or too long.
  static std::shared_ptr<Work> make_work(Request&& request);

  /// Numbers works without a name, and queues all works, or none on an error. Works of a group
  /// (Fingerprint::group) are added alone, and get one number.
  /// Errors: Error(kInvalidArgument) if a name is in flight.
  void add(const Lock& lock, std::span<const std::shared_ptr<Work>> works);

  /// Moves all works to the end of `works`, in the order of their submission.
  void take(const Lock& lock, std::deque<std::shared_ptr<Work>>& works);

  /// Whether take() would move something. Needs no lock.
  bool has_works() const { return has_works_.load(std::memory_order_acquire); }

  /// The size of the queued tensors.
  std::size_t bytes(const Lock&) const { return bytes_; }

  /// Whether several threads have submitted works so far.
  bool has_several_submitters(const Lock&) const { return has_several_submitters_; }

  /// Frees a work's name, and marks the work done.
  void complete(const Lock&, Work& work) {
    recorder_.finished(work);
    free_name(work);
    work.complete();
  }

  /// Frees a work's name, and marks the work failed. Its error names the rank and the request.
  void fail(const Lock& lock, Work& work, const Error& cause);

  /// Restarts the numbering: all ranks wait for the same thing now.
  void reset_numbering(const Lock&) { names_.renew(); }

  /// The records of the works that have been added.
  Recorder& recorder(const Lock&) { return recorder_; }

  /// A work on a device that is not done, which means not enqueued; null if there is none.
  std::shared_ptr<Work> first_on_device(const Lock& lock);

  /// The number of launches so far, modulo 2^32.
  std::uint32_t launches(const Lock&) const { return launches_; }

  /// Counts a launch (Engine::launch): works on a device that are added from now on come after it.
  /// Returns its record: Recorder::launched().
  OperationRecord add_launch(const Lock&, const Fingerprint& what) {
    ++launches_;
    return recorder_.launching(what);
  }

 private:
  // Requests without a name are among those of several threads until one thread has submitted so
  // many.
  static constexpr int kRecent = 100;

  void add_on_device(const std::shared_ptr<Work>& work);
  bool are_threads(std::thread::id thread);

  void free_name(const Work& work) {
    if (!in_flight_.empty()) in_flight_.erase(work.key_);
  }

  const std::string rank_name_;

  std::mutex mutex_;  // guards the members below, and the engine's own state
  std::vector<std::shared_ptr<Work>> works_;
  std::size_t bytes_ = 0;
  // Whether works_ is not empty: a hint, as works change hands under the mutex. add() releases it
  // before the engine wakes the board, and the progress thread acquires it after it was woken, so
  // it never misses the work of a wake-up.
  std::atomic<bool> has_works_{false};
  std::unordered_map<std::string, Work*> in_flight_;  // by key; without numbered works: no two have
                                                      // the same number
  Names names_;
  Recorder recorder_;
  std::deque<std::weak_ptr<Work>> on_device_;  // all pending ones, and some done ones
  std::uint32_t launches_ = 0;                 // of this rank, modulo 2^32
  std::thread::id submitter_;                  // the first thread that submitted anything
  bool has_several_submitters_ = false;        // another thread has done so too
  std::thread::id numbering_;                  // the thread of the last request without a name
  int alone_ = kRecent;  // the last requests without a name, up to kRecent, were its own
};

}  // namespace torch_ring
