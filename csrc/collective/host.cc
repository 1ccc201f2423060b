#include "collective/host.h"

namespace torch_ring {

namespace {

std::vector<std::shared_ptr<const SharedMemory>> map_memories(World& world,
                                                              const std::vector<int>& ranks) {
  std::vector<std::shared_ptr<const SharedMemory>> memories;
  for (const int rank : ranks) {
    memories.push_back(std::make_shared<const SharedMemory>(std::move(at(world.memory, rank))));
  }
  return memories;
}

std::vector<Doorbell> make_doorbells(
    World& world, const std::vector<int>& ranks,
    const std::vector<std::shared_ptr<const SharedMemory>>& memories) {
  std::vector<Doorbell> doorbells;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    doorbells.emplace_back(std::move(at(world.doorbells, ranks[i])), &memories[i]->header().asleep);
  }
  return doorbells;
}

int index_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

Host::Host(World& world, const EngineConfig& config, const Abort& abort)
    : ranks_(world.topology.ranks_of_host(world.topology.host())),
      memories_(map_memories(world, ranks_)),
      doorbells_(make_doorbells(world, ranks_, memories_)),
      waiter_(abort, at(doorbells_, index_in(ranks_, world.topology.rank)), world.may_spin,
              config.timeout) {
  index_ = index_in(ranks_, world.topology.rank);
  for (const int rank : ranks_) labels_.push_back(at(world.labels, rank));
}

void Host::wait_all(Counter counter, std::uint64_t value, const char* doing) const {
  waiter_.wait([&] { return all_reached(counter, value); },
               [&] { return silent(first_behind(counter, value), doing); });
}

void Host::wait_one(int peer, Counter counter, std::uint64_t value, const char* doing) const {
  const auto& peers = header(peer).*counter;
  waiter_.wait([&] { return peers.load(std::memory_order_acquire) >= value; },
               [&] { return silent(peer, doing); });
}

void Host::barrier() {
  publish(own().barriers, ++barriers_);
  wait_all(&SegmentHeader::barriers, barriers_, "barrier");
}

std::string Host::silent(int peer, const char* doing) const {
  return std::string(doing) + " in shared memory: " + (peer < 0 ? "a peer" : label(peer)) +
         " made no progress for " + in_seconds(waiter_.timeout()) + " (TORCH_RING_TIMEOUT)";
}

}  // namespace torch_ring
