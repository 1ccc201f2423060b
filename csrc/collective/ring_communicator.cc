#include "collective/ring_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "collective/choice.h"

namespace torch_ring {

namespace {

std::byte* bytes_of(void* data) { return static_cast<std::byte*>(data); }
const std::byte* bytes_of(const void* data) { return static_cast<const std::byte*>(data); }

/// At least `bytes` bytes of scratch memory.
std::byte* at_least(std::vector<std::byte>& scratch, std::size_t bytes) {
  if (scratch.size() < bytes) scratch.resize(bytes);
  return scratch.data();
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

void RingCommunicator::allreduce(const void* input, void* output, std::size_t count,
                                 const Reduction& reduction, std::span<const std::int64_t>) {
  if (count == 0) return;
  const std::size_t item = size_of(reduction.dtype);
  const AllreducePath path = choose_allreduce(count * item, size());
  if (path == AllreducePath::kGathered) {
    allreduce_gathered(input, output, count, reduction);
    return;
  }
  const bool halving = path == AllreducePath::kHalving;
  const std::size_t partial_item = size_of(accumulation_dtype(reduction));
  const std::size_t ring_bytes = kChunkBytes * next()->width() * static_cast<std::size_t>(size());
  const std::size_t round_bytes = halving ? kRoundBytes : std::min(ring_bytes, kRoundBytes);

  for (const Range round : ranges_of(count, round_bytes / partial_item)) {
    const std::byte* in = bytes_of(input) + round.begin * item;
    std::byte* out = bytes_of(output) + round.begin * item;
    std::byte* partial = partial_item == item
                             ? out
                             : at_least(partials_, std::min(count * partial_item, round_bytes));

    std::vector<Chunk> chunks;
    for (int i = 0; i < size(); ++i) {
      const Range chunk = chunk_of(round.count, size(), i);
      chunks.push_back({chunk.begin, chunk.begin, chunk.count});
    }
    if (halving) {
      reduce_scatter_halving(partial, in, chunks, reduction);
    } else {
      reduce_scatter(partial, in, chunks, reduction);
    }

    const Range own = chunk_of(round.count, size(), rank());
    const std::array<void*, 1> finished{out + own.begin * item};
    finish_partial(finished, partial + own.begin * partial_item, own.count, reduction);

    std::vector<Range> results;
    for (const Chunk& chunk : chunks) results.push_back({chunk.to * item, chunk.count * item});
    if (halving) {
      gather_doubling(out, results);
    } else {
      gather_chunks(out, results);
    }
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
  const std::array<void*, 1> outputs{output};
  reduce(outputs, by_rank, count, reduction);
}

void RingCommunicator::allreduce_partial(void* partial, std::size_t count,
                                         const Reduction& reduction) {
  allreduce(partial, partial, count, {accumulation_dtype(reduction), reduction.op, Scaling{}});
}

void RingCommunicator::reducescatter(const void* input, void* output,
                                     std::span<const std::size_t> counts,
                                     const Reduction& reduction) {
  const std::size_t item = size_of(reduction.dtype);
  const std::size_t partial_item = size_of(accumulation_dtype(reduction));
  const std::size_t longest_chunk =
      std::min(kChunkBytes * next()->width(), kRoundBytes / counts.size()) / partial_item;
  const std::vector<Range> parts = ranges_of(counts);
  const std::size_t longest = *std::max_element(counts.begin(), counts.end());

  for (const Range round : ranges_of(longest, longest_chunk)) {
    std::vector<Chunk> chunks;
    std::size_t to = 0;
    for (const Range part : parts) {
      const Range range = overlap(part, {part.begin + round.begin, round.count});
      chunks.push_back({range.begin, to, range.count});
      to += range.count;
    }
    std::byte* partial = at_least(partials_, to * partial_item);
    reduce_scatter(partial, bytes_of(input), chunks, reduction);
    const Chunk& own = at(chunks, rank());
    if (own.count == 0) continue;  // other ranks' parts are longer
    const std::array<void*, 1> finished{bytes_of(output) + round.begin * item};
    finish_partial(finished, partial + own.to * partial_item, own.count, reduction);
  }
}

/// Makes this rank's chunk of `partial` the reduction of all ranks' `input`. The other chunks end
/// up with intermediate results.
void RingCommunicator::reduce_scatter(std::byte* partial, const std::byte* input,
                                      std::span<const Chunk> chunks, const Reduction& reduction) {
  const std::size_t item = size_of(reduction.dtype);
  const std::size_t partial_item = size_of(accumulation_dtype(reduction));
  const auto chunk = [&](int index) { return at(chunks, index); };

  // Loads this rank's own values, when they are first needed.
  const auto load = [&](Chunk part) {
    if (partial == input && reduction.scaling.prescale == 1.0) return;
    const std::array<const void*, 1> own{input + part.from * item};
    reduce_partial(partial + part.to * partial_item, own, part.count, reduction);
  };

  const std::vector<RingStep> steps = reduce_scatter_steps(rank(), size());
  load(chunk(steps.empty() ? rank() : steps.front().send));

  for (const RingStep& step : steps) {
    const Chunk outgoing = chunk(step.send);
    const Chunk incoming = chunk(step.receive);
    exchange_and_add(next(), {outgoing.to, outgoing.count}, prev(), {incoming.to, incoming.count},
                     partial, reduction, [&](Range segment) {
                       const std::size_t from = incoming.from + (segment.begin - incoming.to);
                       load({from, segment.begin, segment.count});
                     });
  }
}

/// The same in halving_steps(), for an allreduce: a chunk lies at the same place in both.
void RingCommunicator::reduce_scatter_halving(std::byte* partial, const std::byte* input,
                                              std::span<const Chunk> chunks,
                                              const Reduction& reduction) {
  const std::size_t item = size_of(reduction.dtype);
  const std::size_t partial_item = size_of(accumulation_dtype(reduction));
  const auto load = [&](Range part) {
    if (partial == input && reduction.scaling.prescale == 1.0) return;
    const std::array<const void*, 1> own{input + part.begin * item};
    reduce_partial(partial + part.begin * partial_item, own, part.count, reduction);
  };
  std::vector<Range> ranges;
  for (const Chunk& chunk : chunks) ranges.push_back({chunk.to, chunk.count});

  const std::vector<BruckStep> steps = halving_steps(rank(), size());
  // The first step loads what it adds to; all else is loaded before.
  int unloaded = steps.empty() ? 0 : steps.front().count;
  const int others = size() - unloaded;
  for (const Range part : arc_of(ranges, (rank() + unloaded) % size(), others)) load(part);

  for (const BruckStep& step : steps) {
    // Both ranges of an arc are the receiver's, too: they travel one after the other.
    const std::array<Range, 2> outgoing = arc_of(ranges, step.to, step.count);
    const std::array<Range, 2> incoming = arc_of(ranges, rank(), step.count);
    for (std::size_t i = 0; i < outgoing.size(); ++i) {
      exchange_and_add(at(connections_, step.to).get(), outgoing[i],
                       at(connections_, step.from).get(), incoming[i], partial, reduction,
                       [&](Range segment) {
                         if (unloaded > 0) load(segment);
                       });
    }
    unloaded = 0;
  }
}

/// Sends `outgoing` of `partial` and adds to `incoming` what arrives, segment by segment. Calls
/// load(segment) before it adds to a segment.
template <class Load>
void RingCommunicator::exchange_and_add(Connection* to, Range outgoing, Connection* from,
                                        Range incoming, std::byte* partial,
                                        const Reduction& reduction, Load&& load) {
  const std::size_t partial_item = size_of(accumulation_dtype(reduction));
  const std::size_t bytes = incoming.count * partial_item;
  std::byte* const arriving = at_least(received_, bytes);
  std::size_t reduced = 0;
  exchange(to, {partial + outgoing.begin * partial_item, outgoing.count * partial_item}, from,
           {arriving, bytes}, waiter_, [&](std::size_t arrived_bytes) {
             const std::size_t arrived = arrived_bytes / partial_item;
             const bool all = arrived == incoming.count;
             if (!all && arrived - reduced < kSegmentBytes / partial_item) return;
             const Range segment{incoming.begin + reduced, arrived - reduced};
             load(segment);
             combine_partial(partial + segment.begin * partial_item,
                             arriving + reduced * partial_item, segment.count, reduction);
             reduced = arrived;
           });
}

/// Gathers all chunks of `data` on every rank, which has its own at first.
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
  const Range last = chunks.back();
  if (choose_allgather(last.begin + last.count, size()) == AllgatherPath::kDoubling) {
    gather_doubling(bytes_of(output), chunks);
  } else {
    gather_chunks(bytes_of(output), chunks);
  }
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

void RingCommunicator::barrier() {
  std::byte token{};
  for (const BruckStep& step : bruck_steps(rank(), size())) {
    std::byte arrived{};
    exchange(at(connections_, step.to).get(), {&token, 1}, at(connections_, step.from).get(),
             {&arrived, 1}, waiter_);
  }
}

}  // namespace torch_ring
