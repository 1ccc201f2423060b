// Host: the ranks of one host, with their memories and doorbells, and waiting for them.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collective/world.h"
#include "core/at.h"
#include "core/config.h"
#include "transport/shared_memory.h"
#include "transport/waiter.h"

namespace torch_ring {

/// Thread: the progress thread, but for wake(). Blocking: wait_all(), wait_one() and barrier().
class Host {
 public:
  /// Takes the memories and doorbells of this host's ranks from `world`.
  Host(World& world, const EngineConfig& config, const Abort& abort);

  int index() const { return index_; }  // this rank's, among the ranks of its host
  int size() const { return static_cast<int>(memories_.size()); }
  int rank_of(int index) const { return at(ranks_, index); }
  const std::string& label(int index) const { return at(labels_, index); }

  const SharedMemory& memory(int index) const { return *at(memories_, index); }
  std::shared_ptr<const SharedMemory> own_memory() const { return at(memories_, index_); }
  SegmentHeader& header(int index) const { return memory(index).header(); }
  SegmentHeader& own() const { return header(index_); }
  const Waiter& waiter() const { return waiter_; }

  /// Stores `value` to one of this rank's counters and wakes sleeping peers.
  void publish(std::atomic<std::uint64_t>& counter, std::uint64_t value) const {
    // seq_cst, because ring() follows; the store also releases this rank's earlier writes.
    counter.store(value, std::memory_order_seq_cst);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != index_) at(doorbells_, peer).ring();
    }
  }

  using Counter = std::atomic<std::uint64_t> SegmentHeader::*;

  /// Whether every rank's `counter` has reached `value`.
  bool all_reached(Counter counter, std::uint64_t value) const {
    return first_behind(counter, value) < 0;
  }
  /// A rank (host index) whose `counter` is below `value`, or -1.
  int first_behind(Counter counter, std::uint64_t value) const {
    for (int peer = 0; peer < size(); ++peer) {
      // acquire: the peer's writes before its publish() are visible after this load
      if ((header(peer).*counter).load(std::memory_order_acquire) < value) return peer;
    }
    return -1;
  }

  void wait_all(Counter counter, std::uint64_t value, const char* doing) const;
  void wait_one(int peer, Counter counter, std::uint64_t value, const char* doing) const;

  /// Cost: one store and size - 1 polled lines a rank.
  void barrier();

  /// Wakes this rank if it sleeps. Thread: any.
  void wake() const { at(doorbells_, index_).ring(); }

 private:
  std::string silent(int peer, const char* doing) const;

  int index_ = 0;
  std::vector<int> ranks_;
  std::vector<std::string> labels_;
  std::vector<std::shared_ptr<const SharedMemory>> memories_;
  std::vector<Doorbell> doorbells_;
  Waiter waiter_;
  std::uint64_t barriers_ = 0;
};

}  // namespace torch_ring
