// SPDX-License-Identifier: Apache-2.0
// ShmCommunicator: collectives among the ranks of one host, in shared memory.
#pragma once

#include <memory>
#include <optional>

#include "collective/communicator.h"
#include "collective/host.h"
#include "collective/shm_board.h"
#include "transport/shared_arena.h"

namespace torch_ring {

/// An allreduce of S bytes among n ranks takes one of three paths:
///
///   shared     all buffers lie in arenas: each rank reduces its chunk in place, in all buffers at
///              once. 2S/n read and written by each rank, no copy, one barrier.
///   one-shot   up to 32 KiB: each rank stages S and reduces all of it. One flag.
///   pipelined  each rank stages the other ranks' chunks, (n-1)S/n; reduces its own chunk inside
///              the peers' segments, so that it writes the cache lines that it has read; copies the
///              other chunks out of its own segment. Two flags a segment; the three stages of
///              neighbouring segments overlap.
///
/// Reducescatter and alltoall stage too, with one flag a segment; staging a segment overlaps with
/// collecting the one before. A segment of a reducescatter has the same share of every rank's part:
/// (n-1)S/n are staged, and reduced into the output. In an alltoall each rank stages its parts in
/// the order rank + 1, rank + 2, ..., so that the ranks do not all stage for one receiver at a
/// time.
///
/// A reduce takes the last two paths, too, but writes the sums into the root's segment alone, and
/// nobody else waits for them: each rank reads S, where a root that reduced everything would read
/// (n-1)S. In a gather of parts of P bytes each rank stages P and the root copies all of them out;
/// in a scatter the root stages (n-1)P and each rank copies P out. One flag a segment. Senders run
/// ahead of receivers by the number of slots.
///
/// The only reader of staged bytes owns their cache lines afterwards: the pipeline writes its sums
/// to them, the other collectives call own_cache_lines(). Results of 16 MiB and more are written
/// past the caches, except in an allreduce in place; a sum is then first written to a peer's
/// segment.
///
/// Segments are numbered across all collectives: segment g lies in slot g % kSegments of the
/// staging memory. `staged` and `reduced` count them, so no flag is ever reset.
///
/// No flag marks a slot as free. A rank that has published staged = g touches no peer's segment
/// before g - 1 any more. So when all ranks have published g + 2, segment g + kSegments may take
/// the slot of segment g; its own rank has finished with g by then. claim() waits for that.
class ShmCommunicator : public HostCommunicator {
 public:
  ShmCommunicator(const World& world, const EngineConfig& config, const Abort& abort);

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
  void reduce_to(int root, const void* input, void* output, std::size_t count,
                 const Reduction& reduction) override;
  void gather(const void* input, void* output, std::span<const std::size_t> bytes,
              int root) override;
  void scatter(const void* input, void* output, std::span<const std::size_t> bytes,
               int root) override;
  void barrier() override { host_.barrier(); }
  bool has_shared_memory() const override { return true; }
  std::shared_ptr<void> allocate_shared(std::size_t bytes) override;
  void isolate(const void* data, std::size_t bytes) noexcept override {
    arena_->isolate(data, bytes);
  }
  std::int64_t shared_offset_of(const void* data, std::size_t bytes) const override {
    return arena_->offset_of(data, bytes);
  }

  // For the hierarchical communicator, which adds a network to this host.
  Host& host() { return host_; }

 private:
  struct Pipeline;

  void allreduce_shared(std::size_t count, const Reduction& reduction,
                        std::span<const std::int64_t> offsets);
  // With a `root`, the result goes to that rank alone.
  void allreduce_one_shot(const void* input, void* output, std::size_t count,
                          const Reduction& reduction, std::optional<int> root = {});
  void allreduce_pipelined(const void* input, void* output, std::size_t count,
                           const Reduction& reduction, std::optional<int> root = {});

  /// Runs the segments of a collective: calls stage(index, this rank's slot) for each and, one
  /// segment later, collect(index, segment), when every rank has staged it.
  template <class Stage, class Collect>
  void in_segments(std::size_t segments, const char* doing, Stage&& stage, Collect&& collect);

  /// This rank's slot for a new segment, after the last peer has read its old contents.
  std::byte* claim(std::uint64_t segment) const;
  std::byte* slot(int index, std::uint64_t segment) const;

  /// Call after reading data that `peer` staged for all ranks: owns the cache lines if this rank is
  /// their only reader.
  void finish_reading(int peer, std::uint64_t segment, std::size_t bytes) const;

  Host host_;
  ShmBoard board_;
  const std::shared_ptr<SharedArena> arena_;  // of all sets of the process
  std::uint64_t segment_ = 0;  // the last segment of all collectives; the same on all ranks
};

}  // namespace torch_ring
