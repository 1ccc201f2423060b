// SPDX-License-Identifier: Apache-2.0
// Host: the ranks of one host, their slots of shared memory, and the waits for them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/world.h"
#include "core/at.h"
#include "core/config.h"
#include "transport/slot.h"
#include "transport/waiter.h"

namespace torch_ring {

/// Thread: the progress thread, except wake(). Blocking: wait_all(), wait_one() and barrier().
class Host {
 public:
  /// Uses the slots of `world`, and commits the parts of this rank's slot that every set needs.
  /// Errors: Error(kInternal) without memory, or if a slot is invalid.
  Host(const World& world, const EngineConfig& config, const Abort& abort);

  int index() const { return index_; }  // this rank's, among the ranks of its host
  int size() const { return static_cast<int>(slots_.size()); }
  int rank_of(int index) const { return at(ranks_, index); }
  const std::string& label(int index) const { return at(labels_, index); }

  const Slot& slot(int index) const { return at(slots_, index); }
  const Slot& own_slot() const { return slot(index_); }
  SegmentHeader& header(int index) const { return slot(index).header(); }
  SegmentHeader& own() const { return header(index_); }
  const Waiter& waiter() const { return waiter_; }

  /// The byte at an offset in a rank's memory, not in its slot:
  /// HostCommunicator::shared_offset_of().
  std::byte* buffer(int index, std::size_t offset) const {
    return at(places_, index).memory->at(offset);
  }

  /// Commits a range of this rank's slot; in huge pages, where available. Errors: Error(kInternal).
  void commit(std::size_t offset, std::size_t bytes) const;
  void commit_huge(std::size_t offset, std::size_t bytes) const;

  /// Stores `value` to one of this rank's counters and wakes sleeping peers.
  void publish(std::atomic<std::uint64_t>& counter, std::uint64_t value) {
    // seq_cst, because ring() follows; the store also releases this rank's earlier writes.
    counter.store(value, std::memory_order_seq_cst);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != index_) doorbell_.ring(header(peer).doorbell);
    }
  }

  using Counter = std::atomic<std::uint64_t> SegmentHeader::*;

  /// The value of a peer's counter; the peer's writes before its publish() are visible afterwards.
  /// seq_cst, because a rank loads it before it sleeps (Doorbell).
  static std::uint64_t load(const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_seq_cst);
  }

  /// Whether every rank's `counter` has reached `value`.
  bool all_reached(Counter counter, std::uint64_t value) const {
    for (int peer = 0; peer < size(); ++peer) {
      if (load(header(peer).*counter) < value) return false;
    }
    return true;
  }

  void wait_all(Counter counter, std::uint64_t value, const char* doing) const;
  void wait_one(int peer, Counter counter, std::uint64_t value, const char* doing) const;

  /// Cost: one store and size - 1 polled lines a rank.
  void barrier();

  /// Wakes this rank if it sleeps. Thread: any.
  void wake() { doorbell_.wake(); }

 private:
  /// The ranks whose `counter` is below `value`.
  std::vector<int> behind(Counter counter, std::uint64_t value) const;
  Standstill silent(std::vector<int> ranks, const char* doing) const;

  std::vector<int> ranks_;
  int index_;
  std::vector<std::string> labels_;
  std::vector<SlotPlace> places_;
  std::vector<Slot> slots_;  // at places_
  Doorbell doorbell_;
  Waiter waiter_;
  std::uint64_t barriers_ = 0;
};

}  // namespace torch_ring
