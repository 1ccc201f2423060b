#include "collective/ring_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace torch_ring {

namespace {

// Bytes of a segment, which is reduced or forwarded while the next one travels: small enough for
// the L2 cache, large enough that a system call costs little of its time.
constexpr std::size_t kSegmentBytes = 256u << 10;

// Up to this size an allreduce gathers all inputs: fewer steps pay more than fewer bytes. With n
// ranks a ring takes 2(n - 1) - log2(n) steps more, and gathering S bytes moves about (n - 3) S
// bytes more. Both grow alike with n, so the bound does not depend on it.
constexpr std::size_t kGatheredBytes = 64u << 10;

// Bytes of a chunk (for each socket) and of a round. A tensor goes through the ring in rounds,
// which stay in the cache and bound the scratch memory: one received chunk, and for 16-bit floats
// one round of partial results. One chunk is in flight at a time, so it grows with the sockets.
constexpr std::size_t kChunkBytes = 1u << 20;
constexpr std::size_t kRoundBytes = 64u << 20;

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
  if (count * item <= kGatheredBytes) {
    allreduce_gathered(input, output, count, reduction);
    return;
  }
  const std::size_t partial_item = size_of(accumulation_dtype(reduction.dtype));
  const std::size_t ranks = static_cast<std::size_t>(size());
  const std::size_t round_bytes = std::min(kChunkBytes * next()->width() * ranks, kRoundBytes);

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
    reduce_scatter(partial, in, chunks, reduction);

    const Range own = chunk_of(round.count, size(), rank());
    const std::array<void*, 1> finished{out + own.begin * item};
    finish_partial(finished, partial + own.begin * partial_item, own.count, reduction);

    std::vector<Range> results;
    for (const Chunk& chunk : chunks) results.push_back({chunk.to * item, chunk.count * item});
    gather_chunks(out, results);
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
  allreduce(partial, partial, count,
            {accumulation_dtype(reduction.dtype), reduction.op, Scaling{}});
}

void RingCommunicator::reducescatter(const void* input, void* output,
                                     std::span<const std::size_t> counts,
                                     const Reduction& reduction) {
  const std::size_t item = size_of(reduction.dtype);
  const std::size_t partial_item = size_of(accumulation_dtype(reduction.dtype));
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
  const std::size_t partial_item = size_of(accumulation_dtype(reduction.dtype));
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
    const std::size_t bytes = incoming.count * partial_item;
    std::byte* const arriving = at_least(received_, bytes);
    std::size_t reduced = 0;
    exchange(next(), {partial + outgoing.to * partial_item, outgoing.count * partial_item}, prev(),
             {arriving, bytes}, waiter_, [&](std::size_t arrived_bytes) {
               const std::size_t arrived = arrived_bytes / partial_item;
               const bool all = arrived == incoming.count;
               if (!all && arrived - reduced < kSegmentBytes / partial_item) return;
               const Chunk segment{incoming.from + reduced, incoming.to + reduced,
                                   arrived - reduced};
               load(segment);
               combine_partial(partial + segment.to * partial_item,
                               arriving + reduced * partial_item, segment.count, reduction);
               reduced = arrived;
             });
  }
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

void RingCommunicator::allgather(const void* input, void* output,
                                 std::span<const std::size_t> bytes) {
  const std::vector<Range> chunks = ranges_of(bytes);
  const Range own = at(chunks, rank());
  std::byte* const to = bytes_of(output) + own.begin;
  if (to != input && own.count > 0) std::memcpy(to, input, own.count);
  gather_chunks(bytes_of(output), chunks);
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
  // A chain from the root: a rank sends one segment on while it receives the next.
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
