// SPDX-License-Identifier: Apache-2.0
// Communicator: collectives among fixed ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "collective/board.h"
#include "core/reduce.h"

namespace torch_ring {

/// All ranks call the same functions in the same order with matching arguments; the engine ensures
/// this (engine/agreement.h). Buffers need no alignment beyond their dtype's.
///
/// Thread: one at a time. Blocking: until this rank's part is done, bounded by the timeout.
/// Errors: Error kinds kPeerLost, kTimeout, kInternal; after one, the communicator is unusable.
/// Results are the same bits on all ranks and on every run: the order in which the ranks' values of
/// an element are added is the same for all elements of all reductions. (Adasum adds in an order of
/// its own.)
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// output[i] = the reduction of input[i] over the ranks; `input` may be `output`.
  /// `shared_offsets`: empty, or HostCommunicator::shared_offset_of() of the buffers of this host's
  /// ranks (then they are in shared memory on all hosts, input == output, and nothing is staged).
  virtual void allreduce(const void* input, void* output, std::size_t count,
                         const Reduction& reduction,
                         std::span<const std::int64_t> shared_offsets = {}) = 0;

  /// `data` of every rank becomes `data` of rank `root`.
  virtual void broadcast(void* data, std::size_t bytes, int root) = 0;

  /// `output` becomes the ranks' inputs, one after the other; rank r sends bytes[r] bytes.
  virtual void allgather(const void* input, void* output, std::span<const std::size_t> bytes) = 0;

  /// `output` becomes the parts that the ranks send to this one, in the order of ranks. Rank r's
  /// `input` holds its parts in the order of receivers; its part for rank s has bytes[r * size() +
  /// s] bytes. The buffers do not overlap.
  virtual void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) = 0;

  /// `output` becomes this rank's part of the reduction of the inputs, counts[rank()] elements.
  /// `input` holds the parts in the order of ranks. The buffers do not overlap.
  virtual void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                             const Reduction& reduction) = 0;

  /// `output` of rank `root` becomes the result of allreduce(), with the same bits. The others'
  /// `output` is not used. The root's `input` may be its `output`.
  virtual void reduce_to(int root, const void* input, void* output, std::size_t count,
                         const Reduction& reduction) = 0;

  /// `output` of rank `root` becomes the ranks' inputs, one after the other; rank r sends bytes[r]
  /// bytes. The others' `output` is not used. The root's `input` may be its part of `output`. This
  /// default, and that of a scatter, is an alltoall, which then must allow that.
  virtual void gather(const void* input, void* output, std::span<const std::size_t> bytes,
                      int root);

  /// `output` becomes this rank's part, bytes[rank()] bytes, of `input` of rank `root`, which holds
  /// the parts in the order of ranks. The others' `input` is not used. The root's `output` may be
  /// its part of `input`.
  virtual void scatter(const void* input, void* output, std::span<const std::size_t> bytes,
                       int root);

  /// output[i] = the result of an allreduce() to which rank r contributes inputs[r][i], with the
  /// same bits. Local: nothing is sent. This default reduces in the order of ranks.
  virtual void reduce_inputs(std::span<const void* const> inputs, void* output, std::size_t count,
                             const Reduction& reduction) const;

  /// `data`, consecutive tensors of the given lengths, becomes its adaptive sum over the ranks
  /// (collective/adasum.h).
  void adasum(void* data, std::span<const std::size_t> counts, DType dtype);

  virtual void barrier() = 0;
};

/// A communicator over host memory: with a board on which its ranks agree and, if several ranks
/// share a host, memory in which an allreduce in place copies nothing.
class HostCommunicator : public Communicator {
 public:
  /// The ranks' board. It lives as long as the communicator.
  virtual Board& board() = 0;

  // Memory of this rank that the other ranks of its host have mapped.
  // Thread: any. Blocking: while the system looks for memory.

  /// Whether there is some. Without it the functions below do nothing.
  virtual bool has_shared_memory() const { return false; }

  /// New memory, freed with its last reference, which may outlive the communicator. Null if the
  /// address space set aside for it is used up. Errors: Error(kInternal) when no memory is left.
  virtual std::shared_ptr<void> allocate_shared(std::size_t /*bytes*/) { return nullptr; }

  /// Replaces the pages of [data, data + bytes) by private ones with the same content at the same
  /// address, out of the other ranks' reach: shared_offset_of() is -1 from then on. Other threads
  /// may write to it meanwhile.
  virtual void isolate(const void* /*data*/, std::size_t /*bytes*/) noexcept {}

  /// The offset of [data, data + bytes) in this rank's memory, or -1 if it lies elsewhere.
  virtual std::int64_t shared_offset_of(const void* /*data*/, std::size_t /*bytes*/) const {
    return -1;
  }
};

}  // namespace torch_ring
