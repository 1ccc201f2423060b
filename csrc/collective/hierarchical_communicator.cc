#include "collective/hierarchical_communicator.h"

#include <cstring>
#include <numeric>

#include "collective/grouped_reduction.h"
#include "core/at.h"

namespace torch_ring {

HierarchicalCommunicator::HierarchicalCommunicator(World& world, const EngineConfig& config,
                                                   const Abort& abort)
    : rank_(world.topology.rank),
      size_(world.topology.size()),
      host_of_(world.topology.host_of),
      ranks_of_host_(world.topology.hosts()),
      lanes_(world.topology.lanes()),
      routes_(ranks_of_host_, lanes_),
      sockets_(std::move(world.sockets)),
      shm_(world, config, abort),
      staging_(shm_.host().own_slot().rounds()) {
  shm_.host().commit_huge(Slot::kRounds, Slot::kRoundBytes);
  const int lane = shm_.rank();
  if (lane < lanes_) {
    std::vector<std::unique_ptr<Connection>> connections;
    for (const auto& ranks : ranks_of_host_) {
      const int peer = at(ranks, lane);
      connections.push_back(
          peer == rank_ ? nullptr
                        : std::make_unique<Connection>(*sockets_, peer, world.width,
                                                       at(world.labels, peer), world.checksums));
    }
    std::vector<std::uint32_t> host_sizes;
    for (const auto& ranks : ranks_of_host_) {
      host_sizes.push_back(static_cast<std::uint32_t>(ranks.size()));
    }
    lane_ = std::make_unique<RingCommunicator>(at(host_of_, rank_), std::move(connections),
                                               shm_.host().waiter(), std::move(host_sizes));
  }
  board_ = std::make_unique<HierarchicalBoard>(shm_.host(), ranks_of_host_,
                                               leads() ? &lane_->board() : nullptr);
}

void HierarchicalCommunicator::allreduce(const void* input, void* output, std::size_t count,
                                         const Reduction& reduction,
                                         std::span<const std::int64_t> shared_offsets) {
  if (count == 0) return;
  if (!shared_offsets.empty()) {
    allreduce_in_place(buffers_of_host(shared_offsets), count, reduction);
    return;
  }
  const std::size_t item = size_of(reduction.dtype);
  allreduce_in_rounds(input, count, reduction, [&](Range round) {
    std::memcpy(static_cast<std::byte*>(output) + round.begin * item, staging_, round.count * item);
  });
}

void HierarchicalCommunicator::reducescatter(const void* input, void* output,
                                             std::span<const std::size_t> counts,
                                             const Reduction& reduction) {
  const std::vector<Range> parts = ranges_of(counts);
  const Range own = at(parts, rank_);
  const std::size_t item = size_of(reduction.dtype);
  allreduce_in_rounds(input, parts.back().begin + parts.back().count, reduction, [&](Range round) {
    const Range part = overlap(own, round);
    if (part.count == 0) return;
    std::memcpy(static_cast<std::byte*>(output) + (part.begin - own.begin) * item,
                staging_ + (part.begin - round.begin) * item, part.count * item);
  });
}

void HierarchicalCommunicator::reduce_inputs(std::span<const void* const> inputs, void* output,
                                             std::size_t count, const Reduction& reduction) const {
  reduce_in_groups({&output, 1}, inputs, ranks_of_host_, count, reduction);
}

template <class Take>
void HierarchicalCommunicator::allreduce_in_rounds(const void* input, std::size_t count,
                                                   const Reduction& reduction, Take&& take) {
  const std::size_t item = size_of(reduction.dtype);
  const std::vector<std::byte*> staging = buffers_of_host({});
  for (const Range round : ranges_of(count, Slot::kRoundBytes / item)) {
    std::memcpy(staging_, static_cast<const std::byte*>(input) + round.begin * item,
                round.count * item);
    shm_.barrier();
    allreduce_in_place(staging, round.count, reduction);
    take(round);
  }
}

std::vector<std::byte*> HierarchicalCommunicator::buffers_of_host(
    std::span<const std::int64_t> shared_offsets) {
  const Host& host = shm_.host();
  std::vector<std::byte*> buffers;
  for (int peer = 0; peer < host.size(); ++peer) {
    const auto shared = [&] { return static_cast<std::size_t>(at(shared_offsets, peer)); };
    buffers.push_back(shared_offsets.empty() ? host.slot(peer).rounds()
                                             : host.buffer(peer, shared()));
  }
  return buffers;
}

void HierarchicalCommunicator::allreduce_in_place(std::span<std::byte* const> buffers,
                                                  std::size_t count, const Reduction& reduction) {
  const int lane = shm_.rank();
  if (lane < lanes_) {
    const Range chunk = chunk_of(count, lanes_, lane);
    std::vector<void*> outputs;
    for (std::byte* buffer : buffers) {
      outputs.push_back(buffer + chunk.begin * size_of(reduction.dtype));
    }
    const std::vector<const void*> inputs(outputs.begin(), outputs.end());
    partial_.resize(chunk.count * size_of(accumulation_dtype(reduction)));
    reduce_partial(partial_.data(), inputs, chunk.count, reduction);
    lane_->allreduce_partial(partial_.data(), chunk.count, reduction);
    finish_partial(outputs, partial_.data(), chunk.count, reduction);
  }
  shm_.barrier();
}

void HierarchicalCommunicator::broadcast(void* data, std::size_t bytes, int root) {
  if (bytes == 0) return;
  const int root_host = at(host_of_, root);
  const bool at_root = at(host_of_, rank_) == root_host;
  if (at_root) {
    const auto& ranks = at(ranks_of_host_, root_host);
    const auto index = std::find(ranks.begin(), ranks.end(), root) - ranks.begin();
    shm_.broadcast(data, bytes, static_cast<int>(index));
  }
  if (leads()) lane_->broadcast(data, bytes, root_host);
  if (!at_root) shm_.broadcast(data, bytes, 0);
}

void HierarchicalCommunicator::allgather(const void* input, void* output,
                                         std::span<const std::size_t> bytes) {
  // `all` has the parts in the order of hosts. Each host gathers its own in shared memory, the
  // leaders gather those of all hosts, and each leader broadcasts all to its host.
  std::vector<std::size_t> host_bytes(ranks_of_host_.size(), 0);
  std::vector<std::size_t> local_bytes;
  const int own_host = at(host_of_, rank_);
  std::size_t own_begin = 0;
  for (std::size_t host = 0; host < ranks_of_host_.size(); ++host) {
    for (const int rank : ranks_of_host_[host]) {
      const std::size_t part = at(bytes, rank);
      host_bytes[host] += part;
      if (static_cast<int>(host) == own_host) local_bytes.push_back(part);
    }
    if (static_cast<int>(host) < own_host) own_begin += host_bytes[host];
  }
  std::vector<std::byte> all(std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}));
  shm_.allgather(input, all.data() + own_begin, local_bytes);
  if (leads()) lane_->allgather(all.data() + own_begin, all.data(), host_bytes);
  shm_.broadcast(all.data(), all.size(), 0);

  std::vector<std::size_t> begins(bytes.size(), 0);
  std::exclusive_scan(bytes.begin(), bytes.end(), begins.begin(), std::size_t{0});
  const std::byte* from = all.data();
  for (const auto& ranks : ranks_of_host_) {
    for (const int rank : ranks) {
      const std::size_t part = at(bytes, rank);
      if (part > 0) std::memcpy(static_cast<std::byte*>(output) + at(begins, rank), from, part);
      from += part;
    }
  }
}

void HierarchicalCommunicator::alltoall(const void* input, void* output,
                                        std::span<const std::size_t> bytes) {
  routed_alltoall(routes_, rank_, shm_, lane_.get(), input, output, bytes);
}

void HierarchicalCommunicator::barrier() {
  shm_.barrier();
  if (leads()) lane_->barrier();
  shm_.barrier();
}

}  // namespace torch_ring
