// SPDX-License-Identifier: Apache-2.0
#include "collective/ring_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "collective/choice.h"
#include "collective/grouped_reduction.h"
#include "core/bytes.h"

namespace torch_ring {

namespace {

/// At least `bytes` bytes of scratch memory.
std::byte* at_least(std::vector<std::byte>& scratch, std::size_t bytes) {
  if (scratch.size() < bytes) scratch.resize(bytes);
  return scratch.data();
}

/// The same elements of all inputs, `bytes` further on.
std::vector<const void*> shifted(std::span<const void* const> inputs, std::size_t bytes) {
  std::vector<const void*> all;
  for (const void* const input : inputs) all.push_back(bytes_of(input) + bytes);
  return all;
}

std::vector<Connection*> raw(const std::vector<std::unique_ptr<Connection>>& connections) {
  std::vector<Connection*> pointers;
  for (const auto& connection : connections) pointers.push_back(connection.get());
  return pointers;
}

}  // namespace

RingCommunicator::RingCommunicator(int rank, std::vector<std::unique_ptr<Connection>> connections,
                                   const Waiter& waiter, std::vector<std::uint32_t> ranks_of_member)
    : rank_(rank),
      connections_(std::move(connections)),
      waiter_(waiter),
      board_(rank, raw(connections_), waiter, std::move(ranks_of_member)) {}

std::size_t RingCommunicator::round_bytes() const {
  return std::min(kChunkBytes * next()->width() * static_cast<std::size_t>(size()), kRoundBytes);
}

void RingCommunicator::allreduce(const void* input, void* output, std::size_t count,
                                 const Reduction& reduction, std::span<const std::int64_t>) {
  if (count == 0) return;
  const std::size_t item = size_of(reduction.dtype);
  if (choose_allreduce(count * item, size()) == AllreducePath::kGathered) {
    allreduce_gathered(input, output, count, reduction);
    return;
  }
  for (const Range round : ranges_of(count, round_bytes() / item)) {
    std::byte* const out = bytes_of(output) + round.begin * item;
    const std::vector<Range> chunks = chunks_by_rank(round.count, size());
    reduce_scatter(bytes_of(input) + round.begin * item, out + at(chunks, rank()).begin * item,
                   chunks, reduction);
    std::vector<Range> results;
    for (const Range chunk : chunks) results.push_back({chunk.begin * item, chunk.count * item});
    gather_everywhere(out, results);
  }
}

/// Gathers all inputs on every rank (Bruck's allgather), and reduces them there.
void RingCommunicator::allreduce_gathered(const void* input, void* output, std::size_t count,
                                          const Reduction& reduction) {
  const std::size_t bytes = count * size_of(reduction.dtype);
  const auto ranks = static_cast<std::size_t>(size());
  std::byte* const inputs = at_least(received_, bytes * ranks);  // of rank(), rank() + 1, ...
  std::memcpy(inputs, input, bytes);
  std::size_t gathered = bytes;
  for (const BruckStep& step : bruck_steps(rank(), size())) {
    const std::size_t moving = static_cast<std::size_t>(step.count) * bytes;
    exchange(at(connections_, step.to).get(), {inputs, moving}, at(connections_, step.from).get(),
             {inputs + gathered, moving}, waiter_);
    gathered += moving;
  }
  std::vector<const void*> by_rank;
  for (std::size_t i = 0; i < ranks; ++i) {
    by_rank.push_back(inputs + (i + ranks - static_cast<std::size_t>(rank())) % ranks * bytes);
  }
  reduce_inputs(by_rank, output, count, reduction);
}

void RingCommunicator::reduce_inputs(std::span<const void* const> inputs, void* output,
                                     std::size_t count, const Reduction& reduction) const {
  reduce_in_groups({&output, 1}, inputs, sections_of(size()), count, reduction);
}

void RingCommunicator::allreduce_partial(void* partial, std::size_t count,
                                         const Reduction& reduction) {
  allreduce(partial, partial, count, {accumulation_dtype(reduction), reduction.op, Scaling{}});
}

void RingCommunicator::reduce_partial_to(int root, void* partial, std::size_t count,
                                         const Reduction& reduction) {
  reduce_to(root, partial, partial, count,
            {accumulation_dtype(reduction), reduction.op, Scaling{}});
}

void RingCommunicator::reducescatter(const void* input, void* output,
                                     std::span<const std::size_t> counts,
                                     const Reduction& reduction) {
  const std::size_t item = size_of(reduction.dtype);
  const std::size_t longest_chunk =
      std::min(kChunkBytes * next()->width(), kRoundBytes / counts.size()) / item;
  const std::vector<Range> parts = ranges_of(counts);
  const std::size_t longest = *std::max_element(counts.begin(), counts.end());

  for (const Range round : ranges_of(longest, longest_chunk)) {
    const auto chunk_of_rank = [&](int peer) {
      const Range part = at(parts, peer);
      return overlap(part, {part.begin + round.begin, round.count});
    };
    const Range own = chunk_of_rank(rank());
    const std::size_t bytes = own.count * item;
    std::byte* const arriving = at_least(received_, static_cast<std::size_t>(size()) * bytes);
    std::vector<const void*> inputs(static_cast<std::size_t>(size()));
    at(inputs, rank()) = bytes_of(input) + own.begin * item;

    // As many peers at once as a section has. All inputs are here when the last ones arrive.
    for (int first = 1; first < size(); first += kSectionRanks - 1) {
      const int last = std::min(first + kSectionRanks - 1, size());
      std::vector<OutgoingBytes> outgoing;
      std::vector<IncomingBytes> incoming;
      for (int distance = first; distance < last; ++distance) {
        const int to = (rank() + distance) % size();
        const Range given = chunk_of_rank(to);
        outgoing.push_back(
            {neighbour(distance), {bytes_of(input) + given.begin * item, given.count * item}});
        const int from = (rank() + size() - distance) % size();
        std::byte* const place = arriving + static_cast<std::size_t>(from) * bytes;
        incoming.push_back({neighbour(size() - distance), {place, bytes}});
        at(inputs, from) = place;
      }
      exchange_and_add(outgoing, incoming, own.count, item, [&](Range segment) {
        if (last < size()) return;
        reduce_inputs(shifted(inputs, segment.begin * item),
                      bytes_of(output) + (round.begin + segment.begin) * item, segment.count,
                      reduction);
      });
    }
  }
}

/// Reduces this rank's chunk of all ranks' `input` into `result`.
void RingCommunicator::reduce_scatter(const std::byte* input, std::byte* result,
                                      std::span<const Range> chunks, const Reduction& reduction) {
  const std::vector<ScatterLevel> levels = scatter_levels(rank(), size());
  const bool in_one = levels.size() == 1 && levels.front().chunks == 1;
  const std::size_t partial_item = size_of(accumulation_dtype(reduction));
  const Reduction inner{accumulation_dtype(reduction), reduction.op, {}};

  // The first level adds inputs, the others partial results of the arc that begins at `origin`.
  const std::byte* data = input;
  std::size_t origin = 0;
  std::size_t item = size_of(reduction.dtype);
  for (const ScatterLevel& level : levels) {
    const auto arc = [&](int index) {
      if (index >= level.arcs) return Range{};
      return arc_of(chunks, level.first_chunk + index * level.chunks, level.chunks)[0];
    };
    const bool first_level = data == input;
    const Range own = arc(level.index);
    if (first_level && !in_one) at_least(partials_, own.count * partial_item);
    const std::size_t begin = own.count == 0 ? 0 : own.begin - origin;
    const auto members = static_cast<int>(level.section.size());
    const std::size_t bytes = own.count * item;
    std::byte* arriving = at_least(received_, static_cast<std::size_t>(members - 1) * bytes);

    std::vector<const void*> inputs(static_cast<std::size_t>(members));
    at(inputs, level.index) = data + begin * item;
    std::vector<OutgoingBytes> outgoing;
    std::vector<IncomingBytes> incoming;
    for (int distance = 1; distance < members; ++distance) {  // each begins with another receiver
      const int to = (level.index + distance) % members;
      const Range given = arc(to);
      if (given.count > 0) {
        outgoing.push_back({at(connections_, at(level.section, to)).get(),
                            {data + (given.begin - origin) * item, given.count * item}});
      }
      const int from = (level.index + members - distance) % members;
      incoming.push_back({at(connections_, at(level.section, from)).get(), {arriving, bytes}});
      at(inputs, from) = arriving;
      arriving += bytes;
    }
    // Partial results begin at the first level's arc, in place of the own ones.
    const std::size_t place = first_level ? 0 : begin;
    exchange_and_add(outgoing, incoming, own.count, item, [&](Range segment) {
      const std::vector<const void*> arrived = shifted(inputs, segment.begin * item);
      if (in_one) {
        const std::array<void*, 1> reduced{result + segment.begin * item};
        reduce(reduced, arrived, segment.count, reduction);
      } else {
        reduce_partial(partials_.data() + (place + segment.begin) * partial_item, arrived,
                       segment.count, first_level ? reduction : inner);
      }
    });
    if (own.count == 0) return;
    if (first_level) origin = own.begin;
    data = partials_.data();
    item = partial_item;
  }
  if (in_one) return;
  const Range own = at(chunks, rank());
  const std::array<void*, 1> finished{result};
  finish_partial(finished, partials_.data() + (own.begin - origin) * partial_item, own.count,
                 reduction);
}

/// Runs an exchange in which every peer sends `count` elements of `item` bytes, and calls
/// add(segment) for the elements that have arrived from all of them.
template <class Add>
void RingCommunicator::exchange_and_add(std::span<const OutgoingBytes> outgoing,
                                        std::span<const IncomingBytes> incoming, std::size_t count,
                                        std::size_t item, Add&& add) {
  std::size_t added = 0;
  exchange(outgoing, incoming, waiter_, [&](std::size_t arrived_bytes) {
    const std::size_t arrived = arrived_bytes / item;
    if (arrived == added || (arrived < count && arrived - added < kSegmentBytes / item)) return;
    add(Range{added, arrived - added});
    added = arrived;
  });
}

/// Gathers all chunks of `data` on every rank; at first each rank has its own.
void RingCommunicator::gather_everywhere(std::byte* data, std::span<const Range> chunks) {
  const Range last = chunks.back();
  if (choose_allgather(last.begin + last.count, size()) == AllgatherPath::kDoubling) {
    gather_doubling(data, chunks);
  } else {
    gather_chunks(data, chunks);
  }
}

/// The same around the ring.
void RingCommunicator::gather_chunks(std::byte* data, std::span<const Range> chunks) {
  const auto chunk = [&](int index) {
    const Range range = at(chunks, index);
    return std::span(data + range.begin, range.count);
  };
  for (const RingStep& step : allgather_steps(rank(), size())) {
    exchange(next(), chunk(step.send), prev(), chunk(step.receive), waiter_);
  }
}

/// The same in bruck_steps(). Chunk i is that of the i-th rank after `root`.
void RingCommunicator::gather_doubling(std::byte* data, std::span<const Range> chunks, int root) {
  const int self = (rank() - root + size()) % size();
  const auto connection = [&](int index) {
    return at(connections_, (index + root) % size()).get();
  };
  for (const BruckStep& step : bruck_steps(self, size())) {
    const std::array<Range, 2> outgoing = arc_of(chunks, self, step.count);
    const std::array<Range, 2> incoming = arc_of(chunks, step.from, step.count);
    for (std::size_t i = 0; i < outgoing.size(); ++i) {
      exchange(connection(step.to), {data + outgoing[i].begin, outgoing[i].count},
               connection(step.from), {data + incoming[i].begin, incoming[i].count}, waiter_);
    }
  }
}

void RingCommunicator::allgather(const void* input, void* output,
                                 std::span<const std::size_t> bytes) {
  const std::vector<Range> chunks = ranges_of(bytes);
  const Range own = at(chunks, rank());
  std::byte* const to = bytes_of(output) + own.begin;
  if (to != input && own.count > 0) std::memcpy(to, input, own.count);
  gather_everywhere(bytes_of(output), chunks);
}

void RingCommunicator::alltoall(const void* input, void* output,
                                std::span<const std::size_t> bytes) {
  // Directly from rank to rank, not around the ring, at growing distances.
  const std::vector<Range> parts = ranges_of(row_of(bytes, size(), rank()));
  const std::vector<Range> arriving = ranges_of(column_of(bytes, size(), rank()));
  const auto own = static_cast<std::size_t>(rank());
  if (parts[own].count > 0) {
    std::memcpy(bytes_of(output) + arriving[own].begin, bytes_of(input) + parts[own].begin,
                parts[own].count);
  }
  for (int distance = 1; distance < size(); ++distance) {
    const auto to = static_cast<std::size_t>((rank() + distance) % size());
    const auto from = static_cast<std::size_t>((rank() - distance + size()) % size());
    exchange(connections_[to].get(), {bytes_of(input) + parts[to].begin, parts[to].count},
             connections_[from].get(),
             {bytes_of(output) + arriving[from].begin, arriving[from].count}, waiter_);
  }
}

void RingCommunicator::barrier() {
  std::byte token{};
  for (const BruckStep& step : bruck_steps(rank(), size())) {
    std::byte arrived{};
    exchange(at(connections_, step.to).get(), {&token, 1}, at(connections_, step.from).get(),
             {&arrived, 1}, waiter_);
  }
}

void RingCommunicator::reduce_to(int root, const void* input, void* output, std::size_t count,
                                 const Reduction& reduction) {
  if (count == 0) return;
  const std::size_t item = size_of(reduction.dtype);
  if (choose_reduce(count * item, size()) == ReducePath::kDirect) {
    // A reducescatter whose only part is the root's.
    std::vector<std::size_t> counts(static_cast<std::size_t>(size()), 0);
    at(counts, root) = count;
    reducescatter(input, output, counts, reduction);
    return;
  }
  for (const Range round : ranges_of(count, round_bytes() / item)) {
    const std::vector<Range> chunks = chunks_by_rank(round.count, size());
    const Range own = at(chunks, rank());
    if (rank() != root) reduced_.resize(std::max(reduced_.size(), own.count * item));
    std::byte* const to =
        rank() == root ? bytes_of(output) + (round.begin + own.begin) * item : reduced_.data();
    reduce_scatter(bytes_of(input) + round.begin * item, to, chunks, reduction);
    std::vector<std::size_t> bytes;
    for (const Range chunk : chunks) bytes.push_back(chunk.count * item);
    gather(to, rank() == root ? bytes_of(output) + round.begin * item : nullptr, bytes, root);
  }
}

void RingCommunicator::gather(const void* input, void* output, std::span<const std::size_t> bytes,
                              int root) {
  const std::vector<Range> parts = ranges_of(bytes);
  const Range own = at(parts, rank());
  if (rank() == root && own.count > 0 && bytes_of(output) + own.begin != input) {
    std::memcpy(bytes_of(output) + own.begin, input, own.count);
  }
  exchange_with_root(bytes, root, [&](int peer, Range round, auto& outgoing, auto& incoming) {
    if (rank() == root) {
      incoming.push_back({at(connections_, peer).get(),
                          {bytes_of(output) + at(parts, peer).begin + round.begin, round.count}});
    } else {
      outgoing.push_back(
          {at(connections_, root).get(), {bytes_of(input) + round.begin, round.count}});
    }
  });
}

void RingCommunicator::scatter(const void* input, void* output, std::span<const std::size_t> bytes,
                               int root) {
  const std::vector<Range> parts = ranges_of(bytes);
  const Range own = at(parts, rank());
  if (rank() == root && own.count > 0 && bytes_of(input) + own.begin != output) {
    std::memcpy(output, bytes_of(input) + own.begin, own.count);
  }
  exchange_with_root(bytes, root, [&](int peer, Range round, auto& outgoing, auto& incoming) {
    if (rank() == root) {
      outgoing.push_back({at(connections_, peer).get(),
                          {bytes_of(input) + at(parts, peer).begin + round.begin, round.count}});
    } else {
      incoming.push_back(
          {at(connections_, root).get(), {bytes_of(output) + round.begin, round.count}});
    }
  });
}

/// Exchanges parts of the given lengths between the root and all others, in rounds of round_bytes()
/// of each part, with as many ranks at once as a Doorbell can poll. add(rank, range of its part,
/// outgoing, incoming) appends a range to an exchange, on the root and on the range's rank.
template <class Add>
void RingCommunicator::exchange_with_root(std::span<const std::size_t> bytes, int root, Add&& add) {
  const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
  for (const Range round : ranges_of(longest, round_bytes())) {
    for (int first = 1; first < size(); first += kSectionRanks - 1) {
      std::vector<OutgoingBytes> outgoing;
      std::vector<IncomingBytes> incoming;
      for (int distance = first; distance < std::min(first + kSectionRanks - 1, size());
           ++distance) {
        const int peer = (root + distance) % size();
        const Range part = overlap({0, at(bytes, peer)}, round);
        if (part.count > 0 && (rank() == root || rank() == peer)) {
          add(peer, part, outgoing, incoming);
        }
      }
      if (!outgoing.empty() || !incoming.empty()) exchange(outgoing, incoming, waiter_);
    }
  }
}

void RingCommunicator::broadcast(void* data, std::size_t bytes, int root) {
  switch (choose_broadcast(bytes, size())) {
    case BroadcastPath::kChain:
      return broadcast_chain(data, bytes, root);
    case BroadcastPath::kTree: {
      return broadcast_tree(bytes_of(data), root,
                            [&](const TreeEdge&) -> Range { return {0, bytes}; });
    }
    case BroadcastPath::kScattered: {
      std::vector<Range> chunks;
      for (int i = 0; i < size(); ++i) chunks.push_back(chunk_of(bytes, size(), i));
      broadcast_tree(bytes_of(data), root, [&](const TreeEdge& edge) {
        return arc_of(chunks, edge.first, edge.count)[0];
      });
      return gather_doubling(bytes_of(data), chunks, root);
    }
  }
}

/// Sends part(edge) of `data` over every edge of a tree, away from the root.
template <class Part>
void RingCommunicator::broadcast_tree(std::byte* data, int root, Part&& part) {
  const auto bytes = [&](const TreeEdge& edge) {
    const Range range = part(edge);
    return std::span(data + range.begin, range.count);
  };
  const Tree tree = binomial_tree(rank(), size(), root);
  if (tree.parent) {
    exchange(nullptr, {}, at(connections_, tree.parent->peer).get(), bytes(*tree.parent), waiter_);
  }
  for (const TreeEdge& child : tree.children) {
    exchange(at(connections_, child.peer).get(), bytes(child), nullptr, {}, waiter_);
  }
}

void RingCommunicator::broadcast_chain(void* data, std::size_t bytes, int root) {
  // A rank sends one segment on while it receives the next.
  const bool first = rank() == root;
  const bool last = (rank() + 1) % size() == root;
  const std::vector<Range> segments = ranges_of(bytes, kSegmentBytes);
  const auto segment = [&](std::size_t index) {
    return std::span(bytes_of(data) + segments[index].begin, segments[index].count);
  };
  std::span<std::byte> arrived;
  for (std::size_t i = 0; i <= segments.size(); ++i) {
    const std::span<std::byte> due = i < segments.size() ? segment(i) : std::span<std::byte>{};
    exchange(next(), last ? std::span<std::byte>{} : arrived, prev(),
             first ? std::span<std::byte>{} : due, waiter_);
    arrived = due;
  }
}

}  // namespace torch_ring
