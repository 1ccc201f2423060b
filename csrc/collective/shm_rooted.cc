// ShmCommunicator: the collectives with a root that move data as it is.
#include <algorithm>
#include <cstring>

#include "collective/plan.h"
#include "collective/shm_communicator.h"
#include "core/at.h"
#include "core/bytes.h"
#include "memory/cache_lines.h"

namespace torch_ring {

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
