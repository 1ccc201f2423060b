// SPDX-License-Identifier: Apache-2.0
#include "collective/hierarchical_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "collective/grouped_reduction.h"
#include "core/at.h"

namespace torch_ring {

namespace {

std::size_t sum_of(std::span<const std::size_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
}

}  // namespace

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
      connections.push_back(peer == rank_
                                ? nullptr
                                : std::make_unique<Connection>(*sockets_, peer, world.width,
                                                               at(world.labels, peer),
                                                               world.checksums, world.network));
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
                                                   const Reduction& reduction, Take&& take,
                                                   std::optional<int> root) {
  const std::size_t item = size_of(reduction.dtype);
  const std::vector<std::byte*> staging = buffers_of_host({});
  for (const Range round : ranges_of(count, Slot::kRoundBytes / item)) {
    std::memcpy(staging_, static_cast<const std::byte*>(input) + round.begin * item,
                round.count * item);
    shm_.barrier();
    allreduce_in_place(staging, round.count, reduction, root);
    if (!root || *root == rank_) take(round);
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
                                                  std::size_t count, const Reduction& reduction,
                                                  std::optional<int> root) {
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
    if (!root) {
      lane_->allreduce_partial(partial_.data(), chunk.count, reduction);
      finish_partial(outputs, partial_.data(), chunk.count, reduction);
    } else {
      lane_->reduce_partial_to(at(host_of_, *root), partial_.data(), chunk.count, reduction);
      if (is_on_host_of(*root)) {
        const std::array<void*, 1> output{at(outputs, index_of(*root))};
        finish_partial(output, partial_.data(), chunk.count, reduction);
      }
    }
  }
  shm_.barrier();
}

void HierarchicalCommunicator::broadcast(void* data, std::size_t bytes, int root) {
  if (bytes == 0) return;
  const bool at_root = is_on_host_of(root);
  if (at_root) shm_.broadcast(data, bytes, index_of(root));
  if (leads()) lane_->broadcast(data, bytes, at(host_of_, root));
  if (!at_root) shm_.broadcast(data, bytes, 0);
}

int HierarchicalCommunicator::index_of(int rank) const {
  const auto& ranks = at(ranks_of_host_, at(host_of_, rank));
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::vector<std::size_t> HierarchicalCommunicator::bytes_of_ranks(
    std::span<const std::size_t> bytes) const {
  std::vector<std::size_t> own;
  for (const int rank : at(ranks_of_host_, at(host_of_, rank_))) own.push_back(at(bytes, rank));
  return own;
}

std::vector<std::size_t> HierarchicalCommunicator::bytes_of_hosts(
    std::span<const std::size_t> bytes) const {
  std::vector<std::size_t> of_hosts(ranks_of_host_.size(), 0);
  for (int rank = 0; rank < size_; ++rank) at(of_hosts, at(host_of_, rank)) += at(bytes, rank);
  return of_hosts;
}

/// Calls fn(offset in the order of hosts, offset in the order of ranks, bytes) for every part that
/// is not empty.
template <class Fn>
void HierarchicalCommunicator::for_parts_by_host(std::span<const std::size_t> bytes,
                                                 Fn&& fn) const {
  const std::vector<Range> by_rank = ranges_of(bytes);
  std::size_t by_host = 0;
  for (const auto& ranks : ranks_of_host_) {
    for (const int rank : ranks) {
      const Range part = at(by_rank, rank);
      if (part.count > 0) fn(by_host, part.begin, part.count);
      by_host += part.count;
    }
  }
}

void HierarchicalCommunicator::reduce_to(int root, const void* input, void* output,
                                         std::size_t count, const Reduction& reduction) {
  const std::size_t item = size_of(reduction.dtype);
  const auto take = [&](Range round) {
    std::memcpy(static_cast<std::byte*>(output) + round.begin * item, staging_, round.count * item);
  };
  allreduce_in_rounds(input, count, reduction, take, root);
}

void HierarchicalCommunicator::gather(const void* input, void* output,
                                      std::span<const std::size_t> bytes, int root) {
  const int lane = lane_of(root);
  const bool collects = shm_.rank() == lane;
  const std::vector<std::size_t> of_ranks = bytes_of_ranks(bytes);
  const std::vector<std::size_t> of_hosts = bytes_of_hosts(bytes);
  std::vector<std::byte> host_parts(collects ? sum_of(of_ranks) : 0);
  shm_.gather(input, host_parts.data(), of_ranks, lane);

  const std::size_t total = sum_of(bytes);
  const bool ends = collects && is_on_host_of(root);
  std::vector<std::byte> all(ends || rank_ == root ? total : 0);  // in the order of hosts
  if (collects) lane_->gather(host_parts.data(), all.data(), of_hosts, at(host_of_, root));
  if (is_on_host_of(root) && index_of(root) != lane) {
    std::vector<std::size_t> handed_on(of_ranks.size(), 0);
    at(handed_on, lane) = total;
    shm_.gather(all.data(), all.data(), handed_on, index_of(root));
  }
  if (rank_ != root) return;
  for_parts_by_host(bytes, [&](std::size_t by_host, std::size_t by_rank, std::size_t count) {
    std::memcpy(static_cast<std::byte*>(output) + by_rank, all.data() + by_host, count);
  });
}

void HierarchicalCommunicator::scatter(const void* input, void* output,
                                       std::span<const std::size_t> bytes, int root) {
  const int lane = lane_of(root);
  const bool hands_out = shm_.rank() == lane;
  const std::size_t total = sum_of(bytes);
  const bool begins = hands_out && is_on_host_of(root);
  std::vector<std::byte> all(begins || rank_ == root ? total : 0);  // in the order of hosts
  if (rank_ == root) {
    for_parts_by_host(bytes, [&](std::size_t by_host, std::size_t by_rank, std::size_t count) {
      std::memcpy(all.data() + by_host, static_cast<const std::byte*>(input) + by_rank, count);
    });
  }
  const std::vector<std::size_t> of_ranks = bytes_of_ranks(bytes);
  if (is_on_host_of(root) && index_of(root) != lane) {
    std::vector<std::size_t> handed_on(of_ranks.size(), 0);
    at(handed_on, lane) = total;
    shm_.scatter(all.data(), all.data(), handed_on, index_of(root));
  }
  std::vector<std::byte> host_parts(hands_out ? sum_of(of_ranks) : 0);
  if (hands_out) {
    lane_->scatter(all.data(), host_parts.data(), bytes_of_hosts(bytes), at(host_of_, root));
  }
  shm_.scatter(host_parts.data(), output, of_ranks, lane);
}

void HierarchicalCommunicator::allgather(const void* input, void* output,
                                         std::span<const std::size_t> bytes) {
  // `all` has the parts in the order of hosts. Each host gathers its own in shared memory, the
  // leaders gather those of all hosts, and each leader broadcasts all to its host.
  const std::vector<std::size_t> of_hosts = bytes_of_hosts(bytes);
  std::vector<std::byte> all(sum_of(bytes));
  std::byte* const own = all.data() + at(ranges_of(of_hosts), at(host_of_, rank_)).begin;
  shm_.allgather(input, own, bytes_of_ranks(bytes));
  if (leads()) lane_->allgather(own, all.data(), of_hosts);
  shm_.broadcast(all.data(), all.size(), 0);
  for_parts_by_host(bytes, [&](std::size_t by_host, std::size_t by_rank, std::size_t count) {
    std::memcpy(static_cast<std::byte*>(output) + by_rank, all.data() + by_host, count);
  });
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
