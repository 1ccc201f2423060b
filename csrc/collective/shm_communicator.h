// ShmCommunicator: collectives among the ranks of one host.
#pragma once

#include <memory>

#include "collective/host.h"
#include "collective/host_communicator.h"
#include "collective/shm_board.h"
#include "transport/shared_arena.h"

namespace torch_ring {

/// Three ways through an allreduce of S bytes among n ranks, by what must move between cores:
///
///   shared     both buffers are in the arena: each rank reduces its n-th in place, in all buffers
///              at once. 2S/n read and written by each rank, no copy, one barrier.
///   one-shot   small: each rank stages S and reduces all of it. One flag.
///   pipelined  each rank stages what the others will reduce, (n-1)S/n; reduces its n-th inside the
///              peers' segments, so that a line that was read is the line that is written; copies
///              the rest out of its own segment. Two flags a segment, and the three stages of
///              neighbouring segments overlap.
///
/// Reducescatter and alltoall stage too, with one flag a segment; staging a segment overlaps taking
/// the one before. A segment of a reducescatter has as much of every rank's part: (n-1)S/n
/// staged, reduced into the output. In an alltoall each rank stages its parts for rank + 1,
/// rank + 2, ..., so that the ranks do not all wait for one receiver's part at a time.
///
/// A rank that reads staged bytes as the only one owns their lines afterwards, as the pipeline's
/// sums do (own_cache_lines() in memory/cache_lines.h). Results of 16 MiB and more, but those of an
/// allreduce in place, are written past the caches; a sum then goes by way of the segment of a peer
/// that it was read from.
///
/// Segments are numbered through all collectives: segment g lies in slot g % kSegments of the
/// staging memory. `staged` and `reduced` count them, so no flag is ever reset.
///
/// A slot is free without a flag of its own: a rank that has published staged = g touches no
/// peer's segment before g - 1 any more, so that when all have published g + 2, the slot of segment
/// g can take segment g + kSegments: its own rank has done with it before it comes to claim() that,
/// which holds this rule.
class ShmCommunicator : public HostCommunicator, private SharedBuffers {
 public:
  ShmCommunicator(World& world, const EngineConfig& config, const Abort& abort);

  int rank() const override { return host_.index(); }
  int size() const override { return host_.size(); }
  Board& board() override { return board_; }
  void allreduce(const void* input, void* output, std::size_t count, const Reduction& reduction,
                 std::span<const std::int64_t> shared_offsets) override;
  void broadcast(void* data, std::size_t bytes, int root) override;
  void allgather(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                     const Reduction& reduction) override;
  void barrier() override { host_.barrier(); }
  SharedBuffers* shared_buffers() override { return this; }

  // For the hierarchical communicator, which adds a network to this host.
  Host& host() { return host_; }

 private:
  std::shared_ptr<void> allocate(std::size_t bytes) override;
  std::int64_t offset_of(const void* data, std::size_t bytes) const override {
    return arena_->offset_of(data, bytes);
  }

  struct Pipeline;

  void allreduce_shared(std::size_t count, const Reduction& reduction,
                        std::span<const std::int64_t> offsets);
  void allreduce_one_shot(const void* input, void* output, std::size_t count,
                          const Reduction& reduction);
  void allreduce_pipelined(const void* input, void* output, std::size_t count,
                           const Reduction& reduction);

  /// For all segments of a collective: stage(segment, this rank's slot), and one segment later
  /// collect(segment), when every rank has staged it.
  template <class Stage, class Collect>
  void in_segments(std::size_t segments, const char* doing, Stage&& stage, Collect&& collect);

  /// This rank's slot for a new segment, once nobody reads its old contents.
  std::byte* claim(std::uint64_t segment) const;
  std::byte* slot(int index, std::uint64_t segment) const;

  /// After this rank has read what `peer` staged for all: owns the cache lines if nobody else reads
  /// them.
  void finish_reading(int peer, std::uint64_t segment, std::size_t bytes) const;

  Host host_;
  ShmBoard board_;
  std::shared_ptr<SharedArena> arena_;
  std::uint64_t segment_ = 0;  // the last one used by any collective; the same on all ranks
};

}  // namespace torch_ring
