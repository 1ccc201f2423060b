// RingCommunicator: the collectives with a root.
#include <algorithm>
#include <cstring>

#include "collective/choice.h"
#include "collective/ring_communicator.h"
#include "core/bytes.h"

namespace torch_ring {

void RingCommunicator::reduce_to(int root, const void* input, void* output, std::size_t count,
                                 const Reduction& reduction) {
  if (count == 0) return;
  const std::size_t item = size_of(reduction.dtype);
  if (choose_reduce(count * item, size()) == ReducePath::kDirect) {
    // A reducescatter in which all of it is the root's part.
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

/// Exchanges parts of the given lengths between the root and all others: those of a few ranks at
/// once (a Doorbell polls so many), a round of them all after another. add(rank, range of its part,
/// outgoing, incoming) appends to the exchange that a range takes, on the root and on its rank.
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
