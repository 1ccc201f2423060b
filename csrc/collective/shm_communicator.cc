// SPDX-License-Identifier: Apache-2.0
#include "collective/shm_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "collective/plan.h"
#include "core/at.h"
#include "core/bytes.h"
#include "core/failpoint.h"
#include "memory/cache_lines.h"

namespace torch_ring {

namespace {

// Up to so many bytes a second flag costs more than reducing the whole tensor on every rank.
constexpr std::size_t kOneShotBytes = 32u << 10;

}  // namespace

ShmCommunicator::ShmCommunicator(const World& world, const EngineConfig& config, const Abort& abort)
    : host_(world, config, abort), board_(host_), arena_(world.arena) {}

std::shared_ptr<void> ShmCommunicator::allocate_shared(std::size_t bytes) {
  void* const memory = arena_->allocate(bytes);
  if (memory == nullptr) return nullptr;
  return {memory, [arena = arena_](void* data) { arena->free(data); }};
}

std::byte* ShmCommunicator::slot(int index, std::uint64_t segment) const {
  return host_.slot(index).segment(segment);
}

std::byte* ShmCommunicator::claim(std::uint64_t segment) const {
  constexpr std::uint64_t kAhead = Slot::kSegments - 2;
  if (segment > kAhead) host_.wait_all(&SegmentHeader::staged, segment - kAhead, "staging");
  return slot(rank(), segment);
}

void ShmCommunicator::finish_reading(int peer, std::uint64_t segment, std::size_t bytes) const {
  if (size() == 2) own_cache_lines(slot(peer, segment), bytes);
}

void ShmCommunicator::allreduce(const void* input, void* output, std::size_t count,
                                const Reduction& reduction,
                                std::span<const std::int64_t> shared_offsets) {
  if (count == 0) return;
  if (!shared_offsets.empty()) {
    allreduce_shared(count, reduction, shared_offsets);
  } else if (count * size_of(reduction.dtype) <= kOneShotBytes) {
    allreduce_one_shot(input, output, count, reduction);
  } else {
    allreduce_pipelined(input, output, count, reduction);
  }
}

void ShmCommunicator::allreduce_shared(std::size_t count, const Reduction& reduction,
                                       std::span<const std::int64_t> offsets) {
  // Every rank has written its buffer before it agreed to this collective.
  const Range part = chunk_of(count, size(), rank());
  std::vector<void*> buffers;
  for (int peer = 0; peer < size(); ++peer) {
    buffers.push_back(host_.buffer(peer, static_cast<std::size_t>(offsets[peer])) +
                      part.begin * size_of(reduction.dtype));
  }
  const std::vector<const void*> inputs(buffers.begin(), buffers.end());
  failpoint("shared.reduce", rank());
  reduce(buffers, inputs, part.count, reduction);
  host_.barrier();
}

void ShmCommunicator::allreduce_one_shot(const void* input, void* output, std::size_t count,
                                         const Reduction& reduction, std::optional<int> root) {
  const bool gets_result = !root || *root == rank();
  const std::uint64_t segment = ++segment_;
  if (root != rank()) std::memcpy(claim(segment), input, count * size_of(reduction.dtype));
  host_.publish(host_.own().staged, segment);
  if (!gets_result) return;
  host_.wait_all(&SegmentHeader::staged, segment, "allreduce");

  std::vector<const void*> inputs;
  for (int peer = 0; peer < size(); ++peer) inputs.push_back(slot(peer, segment));
  at(inputs, rank()) = input;
  const std::array<void*, 1> outputs{output};
  reduce(outputs, inputs, count, reduction);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) finish_reading(peer, segment, count * size_of(reduction.dtype));
  }
  // `reduced` is not published: only the pipeline waits for it, and it may skip numbers.
}

/// A pipelined allreduce or reduce: its arguments, and the three stages of a segment.
struct ShmCommunicator::Pipeline {
  ShmCommunicator& comm;
  const std::byte* input;
  std::byte* output;
  const Reduction& reduction;
  std::size_t count;
  std::size_t segment_count;  // elements of a segment
  std::uint64_t first;        // number of the first segment
  std::optional<int> root;    // of a reduce

  bool gets_result(int peer) const { return !root || *root == peer; }
  std::size_t item() const { return size_of(reduction.dtype); }
  /// Whether results are written past the caches. Not in place: those lines were just read.
  bool nontemporal() const {
    return input != output && comm.size() > 1 && is_nontemporal(count * item());
  }

  Range segment(std::size_t index) const {
    const std::size_t begin = index * segment_count;
    return {begin, std::min(segment_count, count - begin)};
  }

  /// Calls copy(bytes offset in the segment, bytes offset in the tensor, bytes) for the parts of a
  /// segment that other ranks reduce: those before and after this rank's chunk.
  template <class Copy>
  void for_others_parts(std::size_t index, Copy&& copy) const {
    const Range whole = segment(index);
    const Range mine = chunk_of(whole.count, comm.size(), comm.rank());
    const std::size_t end = mine.begin + mine.count;
    copy(0, whole.begin * item(), mine.begin * item());
    copy(end * item(), (whole.begin + end) * item(), (whole.count - end) * item());
  }

  void stage(std::size_t index) const {
    std::byte* to = comm.claim(first + index);
    for_others_parts(index, [&](std::size_t in_segment, std::size_t in_tensor, std::size_t bytes) {
      std::memcpy(to + in_segment, input + in_tensor, bytes);
    });
    comm.host_.publish(comm.host_.own().staged, first + index);
  }

  void reduce_part(std::size_t index) const {
    comm.host_.wait_all(&SegmentHeader::staged, first + index, "allreduce");
    const Range whole = segment(index);
    const Range mine = chunk_of(whole.count, comm.size(), comm.rank());
    const std::size_t own = (whole.begin + mine.begin) * item();
    // A root is the only rank with the sum: there is no peer's segment to write it to first.
    const bool past_caches = !root && nontemporal();
    std::vector<void*> outputs;
    std::vector<const void*> inputs;
    for (int peer = 0; peer < comm.size(); ++peer) {
      std::byte* theirs = comm.slot(peer, first + index) + mine.begin * item();
      inputs.push_back(peer == comm.rank() ? input + own : theirs);
      if (!gets_result(peer)) continue;
      if (peer != comm.rank()) {
        outputs.push_back(theirs);
      } else if (!past_caches) {
        outputs.push_back(output + own);
      }
    }
    reduce(outputs, inputs, mine.count, reduction);
    if (past_caches) copy_nontemporal(output + own, outputs.front(), mine.count * item());
    comm.host_.publish(comm.host_.own().reduced, first + index);
  }

  void collect(std::size_t index) const {
    if (!gets_result(comm.rank())) return;
    comm.host_.wait_all(&SegmentHeader::reduced, first + index, "allreduce");
    const std::byte* from = comm.slot(comm.rank(), first + index);
    for_others_parts(index, [&](std::size_t in_segment, std::size_t in_tensor, std::size_t bytes) {
      copy_part(output + in_tensor, from + in_segment, bytes, nontemporal());
    });
  }
};

void ShmCommunicator::allreduce_pipelined(const void* input, void* output, std::size_t count,
                                          const Reduction& reduction, std::optional<int> root) {
  const std::size_t item = size_of(reduction.dtype);
  const std::size_t segment_count = Slot::kSegmentBytes / item;
  const std::size_t segments = (count + segment_count - 1) / segment_count;
  const Pipeline pipeline{*this, bytes_of(input), bytes_of(output), reduction,
                          count, segment_count,   segment_ + 1,     root};
  segment_ += segments;
  for (std::size_t i = 0; i < segments + 2; ++i) {
    if (i < segments) pipeline.stage(i);
    if (i >= 1 && i - 1 < segments) pipeline.reduce_part(i - 1);
    if (i >= 2) pipeline.collect(i - 2);
  }
}

void ShmCommunicator::reduce_to(int root, const void* input, void* output, std::size_t count,
                                const Reduction& reduction) {
  if (count == 0) return;
  if (count * size_of(reduction.dtype) <= kOneShotBytes) {
    allreduce_one_shot(input, output, count, reduction, root);
  } else {
    allreduce_pipelined(input, output, count, reduction, root);
  }
}

void ShmCommunicator::allgather(const void* input, void* output,
                                std::span<const std::size_t> bytes) {
  std::vector<std::size_t> begins(bytes.size(), 0);
  for (std::size_t i = 1; i < bytes.size(); ++i) begins[i] = begins[i - 1] + bytes[i - 1];
  const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
  const bool nontemporal = is_nontemporal(begins.back() + bytes.back());

  for (std::size_t done = 0; done < longest; done += Slot::kSegmentBytes) {
    const auto part_of = [&](int peer) {
      const std::size_t all = at(bytes, peer);
      return std::min(Slot::kSegmentBytes, all - std::min(all, done));
    };
    const auto target = [&](int peer) { return bytes_of(output) + at(begins, peer) + done; };
    const std::uint64_t segment = ++segment_;
    const std::byte* own = bytes_of(input) + done;
    const std::size_t own_bytes = part_of(rank());
    if (own_bytes > 0) std::memcpy(claim(segment), own, own_bytes);
    host_.publish(host_.own().staged, segment);
    if (own_bytes > 0 && target(rank()) != own) {
      copy_part(target(rank()), own, own_bytes, nontemporal);
    }
    host_.wait_all(&SegmentHeader::staged, segment, "allgather");
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || part_of(peer) == 0) continue;
      copy_part(target(peer), slot(peer, segment), part_of(peer), nontemporal);
      finish_reading(peer, segment, part_of(peer));
    }
  }
}

template <class Stage, class Collect>
void ShmCommunicator::in_segments(std::size_t segments, const char* doing, Stage&& stage,
                                  Collect&& collect) {
  const std::uint64_t first = segment_ + 1;
  segment_ += segments;
  for (std::size_t i = 0; i < segments + 1; ++i) {
    if (i < segments) {
      stage(i, claim(first + i));
      host_.publish(host_.own().staged, first + i);
    }
    if (i >= 1) {
      host_.wait_all(&SegmentHeader::staged, first + i - 1, doing);
      collect(i - 1, first + i - 1);
    }
  }
}

void ShmCommunicator::alltoall(const void* input, void* output,
                               std::span<const std::size_t> bytes) {
  const std::vector<Range> own_parts = ranges_of(row_of(bytes, size(), rank()));
  const std::vector<Range> own_staged = rotated_ranges(row_of(bytes, size(), rank()), rank());
  const std::vector<Range> arrived = ranges_of(column_of(bytes, size(), rank()));
  std::vector<Range> staged_at;  // this rank's part in the data that each rank stages
  std::size_t longest = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const std::vector<Range> staged = rotated_ranges(row_of(bytes, size(), peer), peer);
    staged_at.push_back(at(staged, rank()));
    for (const Range part : staged) longest = std::max(longest, part.begin + part.count);
  }

  const auto own = static_cast<std::size_t>(rank());
  const bool nontemporal = is_nontemporal(arrived.back().begin + arrived.back().count);
  if (own_parts[own].count > 0) {
    copy_part(bytes_of(output) + arrived[own].begin, bytes_of(input) + own_parts[own].begin,
              own_parts[own].count, nontemporal);
  }
  constexpr std::size_t kBytes = Slot::kSegmentBytes;
  in_segments(
      (longest + kBytes - 1) / kBytes, "alltoall",
      [&](std::size_t index, std::byte* to) {
        for (std::size_t peer = 0; peer < own_parts.size(); ++peer) {
          const Range part = overlap(own_staged[peer], {index * kBytes, kBytes});
          if (part.count == 0) continue;
          std::memcpy(
              to + (part.begin - index * kBytes),
              bytes_of(input) + own_parts[peer].begin + (part.begin - own_staged[peer].begin),
              part.count);
        }
      },
      [&](std::size_t index, std::uint64_t segment) {
        for (std::size_t peer = 0; peer < staged_at.size(); ++peer) {
          const Range part = overlap(staged_at[peer], {index * kBytes, kBytes});
          if (part.count == 0) continue;
          std::byte* from = slot(static_cast<int>(peer), segment) + (part.begin - index * kBytes);
          copy_part(bytes_of(output) + arrived[peer].begin + (part.begin - staged_at[peer].begin),
                    from, part.count, nontemporal);
          own_cache_lines(from, part.count);
        }
      });
}

void ShmCommunicator::reducescatter(const void* input, void* output,
                                    std::span<const std::size_t> counts,
                                    const Reduction& reduction) {
  const std::size_t item = size_of(reduction.dtype);
  // A segment has the same share of every rank's part.
  const std::size_t share = Slot::kSegmentBytes / item / counts.size();
  const std::vector<Range> parts = ranges_of(counts);
  const std::size_t longest = *std::max_element(counts.begin(), counts.end());
  const auto share_of = [&](std::size_t peer, std::size_t index) {
    const Range part = parts[peer];
    return overlap(part, {part.begin + index * share, share});
  };
  const auto own = static_cast<std::size_t>(rank());
  const bool nontemporal = size() > 1 && is_nontemporal(counts[own] * item);
  in_segments((longest + share - 1) / share, "reducescatter",
              [&](std::size_t index, std::byte* to) {
                for (std::size_t peer = 0; peer < parts.size(); ++peer) {
                  const Range range = share_of(peer, index);
                  if (peer == own || range.count == 0) continue;
                  std::memcpy(to + peer * share * item, bytes_of(input) + range.begin * item,
                              range.count * item);
                }
              },
              [&](std::size_t index, std::uint64_t segment) {
                const Range range = share_of(own, index);
                if (range.count == 0) return;
                std::vector<const void*> inputs;
                const auto staged = [&](int peer) {
                  return slot(peer, segment) + own * share * item;
                };
                for (int peer = 0; peer < size(); ++peer) inputs.push_back(staged(peer));
                inputs[own] = bytes_of(input) + range.begin * item;
                std::byte* const result = bytes_of(output) + index * share * item;
                const std::size_t bytes = range.count * item;
                if (nontemporal) {
                  // Reduce into a peer's segment, whose lines this core has read and will own
                  // anyway.
                  std::byte* const sum = staged(rank() == 0 ? 1 : 0);
                  reduce(std::array<void*, 1>{sum}, inputs, range.count, reduction);
                  copy_nontemporal(result, sum, bytes);
                } else {
                  reduce(std::array<void*, 1>{result}, inputs, range.count, reduction);
                }
                for (int peer = 0; peer < size(); ++peer) {
                  if (peer != rank()) own_cache_lines(staged(peer), bytes);
                }
              });
}

void ShmCommunicator::broadcast(void* data, std::size_t bytes, int root) {
  for (std::size_t begin = 0; begin < bytes; begin += Slot::kSegmentBytes) {
    const std::size_t part = std::min(Slot::kSegmentBytes, bytes - begin);
    const std::uint64_t segment = ++segment_;
    if (rank() == root) {
      std::memcpy(claim(segment), bytes_of(data) + begin, part);
    } else {
      host_.wait_one(root, &SegmentHeader::staged, segment, "broadcast");
      copy_part(bytes_of(data) + begin, slot(root, segment), part, is_nontemporal(bytes));
      finish_reading(root, segment, part);
    }
    host_.publish(host_.own().staged, segment);
  }
}

void ShmCommunicator::gather(const void* input, void* output, std::span<const std::size_t> bytes,
                             int root) {
  const std::vector<Range> parts = ranges_of(bytes);
  const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
  const bool nontemporal = is_nontemporal(parts.back().begin + parts.back().count);
  const std::size_t own = at(bytes, rank());
  if (rank() == root && own > 0) {
    std::byte* const to = bytes_of(output) + at(parts, root).begin;
    if (to != input) copy_part(to, input, own, nontemporal);
  }
  for (const Range round : ranges_of(longest, Slot::kSegmentBytes)) {
    const std::uint64_t segment = ++segment_;
    const std::size_t staged = overlap({0, own}, round).count;
    if (rank() != root && staged > 0) {
      std::memcpy(claim(segment), bytes_of(input) + round.begin, staged);
    }
    host_.publish(host_.own().staged, segment);
    if (rank() != root) continue;
    for (int peer = 0; peer < size(); ++peer) {
      const Range part = at(parts, peer);
      const std::size_t count = overlap({0, part.count}, round).count;
      if (peer == root || count == 0) continue;
      host_.wait_one(peer, &SegmentHeader::staged, segment, "gather");
      std::byte* const from = slot(peer, segment);
      copy_part(bytes_of(output) + part.begin + round.begin, from, count, nontemporal);
      own_cache_lines(from, count);
    }
  }
}

void ShmCommunicator::scatter(const void* input, void* output, std::span<const std::size_t> bytes,
                              int root) {
  const std::vector<Range> parts = ranges_of(bytes);
  const std::size_t own = at(bytes, rank());
  const bool nontemporal = is_nontemporal(own);
  if (rank() == root && own > 0) {
    const std::byte* const from = bytes_of(input) + at(parts, root).begin;
    if (from != output) copy_part(output, from, own, nontemporal);
  }
  // A segment has the same share of every part; that of the root stays empty.
  const std::size_t share = Slot::kSegmentBytes / bytes.size() / kCacheLine * kCacheLine;
  const std::size_t longest = *std::max_element(bytes.begin(), bytes.end());
  for (const Range round : ranges_of(longest, share)) {
    const std::uint64_t segment = ++segment_;
    if (rank() == root) {
      std::byte* const to = claim(segment);
      for (int peer = 0; peer < size(); ++peer) {
        const Range part = at(parts, peer);
        const std::size_t count = overlap({0, part.count}, round).count;
        if (peer == root || count == 0) continue;
        std::memcpy(to + static_cast<std::size_t>(peer) * share,
                    bytes_of(input) + part.begin + round.begin, count);
      }
    } else if (const std::size_t count = overlap({0, own}, round).count; count > 0) {
      host_.wait_one(root, &SegmentHeader::staged, segment, "scatter");
      std::byte* const from = slot(root, segment) + static_cast<std::size_t>(rank()) * share;
      copy_part(bytes_of(output) + round.begin, from, count, nontemporal);
      own_cache_lines(from, count);
    }
    host_.publish(host_.own().staged, segment);
  }
}

}  // namespace torch_ring
