// SPDX-License-Identifier: Apache-2.0
#include "collective/host.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace torch_ring {

namespace {

std::vector<Slot> slots_at(const std::vector<SlotPlace>& places, std::size_t ranks) {
  if (places.size() != ranks) {
    throw Error(ErrorKind::kInternal, std::to_string(ranks) + " ranks share a host, but " +
                                          std::to_string(places.size()) + " have a slot");
  }
  std::vector<Slot> slots;
  for (const SlotPlace& place : places) slots.push_back(place.memory->slot(place.offset));
  return slots;
}

int index_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

Host::Host(const World& world, const EngineConfig& config, const Abort& abort)
    : ranks_(world.topology.ranks_of_host(world.topology.host())),
      index_(index_in(ranks_, world.topology.rank)),
      places_(world.slots),
      slots_(slots_at(places_, ranks_.size())),
      doorbell_(own().doorbell),
      waiter_(abort, doorbell_, world.may_spin, config.transfer_timeout(), world.waits) {
  for (const int rank : ranks_) labels_.push_back(at(world.labels, rank));
  commit(0, Slot::kEntries + 2 * Slot::kEntrySlotBytes);
  commit(Slot::kStaging, Slot::kSegments * Slot::kSegmentBytes);
}

void Host::commit(std::size_t offset, std::size_t bytes) const {
  const SlotPlace& own = at(places_, index_);
  own.memory->commit(own.offset + offset, bytes);
}

void Host::commit_huge(std::size_t offset, std::size_t bytes) const {
  const SlotPlace& own = at(places_, index_);
  own.memory->commit_huge(own.offset + offset, bytes);
}

void Host::wait_all(Counter counter, std::uint64_t value, const char* doing) const {
  waiter_.wait([&] { return all_reached(counter, value); },
               [&] { return silent(behind(counter, value), doing); });
}

void Host::wait_one(int peer, Counter counter, std::uint64_t value, const char* doing) const {
  const auto& peers = header(peer).*counter;
  waiter_.wait([&] { return load(peers) >= value; },
               [&] { return silent({rank_of(peer)}, doing); });
}

void Host::barrier() {
  publish(own().barriers, ++barriers_);
  wait_all(&SegmentHeader::barriers, barriers_, "barrier");
}

std::vector<int> Host::behind(Counter counter, std::uint64_t value) const {
  std::vector<int> ranks;
  for (int peer = 0; peer < size(); ++peer) {
    if ((header(peer).*counter).load(std::memory_order_acquire) < value) {
      ranks.push_back(rank_of(peer));
    }
  }
  return ranks;
}

Standstill Host::silent(std::vector<int> ranks, const char* doing) const {
  std::string text = std::string(doing) + " in shared memory: no progress for " +
                     in_seconds(waiter_.timeout()) + " (TORCH_RING_TIMEOUT) of";
  const char* separator = " ";
  for (int peer = 0; peer < size(); ++peer) {
    if (std::ranges::find(ranks, rank_of(peer)) == ranks.end()) continue;
    text.append(std::exchange(separator, ", ")).append(label(peer));
  }
  return {std::move(ranks), std::move(text)};
}

}  // namespace torch_ring
