// Communicator: collectives among fixed ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "collective/board.h"
#include "core/reduce.h"

namespace torch_ring {

/// All ranks call the same function in the same order with arguments that agree; the engine sees to
/// that (engine/agreement.h). Buffers need no alignment beyond their dtype's.
///
/// Thread: one at a time. Blocking: until this rank's part is done, bounded by the timeout.
/// Errors: Error kinds kPeerLost, kTimeout, kInternal; after one, the communicator is unusable.
/// Results are the same bits on all ranks and on every run.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Board& board() = 0;

  /// output[i] = the reduction of input[i] over the ranks; `input` may be `output`.
  /// `shared_offsets`: empty, or every rank's shared_offset() of its buffer (then input == output
  /// and nothing is staged).
  virtual void allreduce(const void* input, void* output, std::size_t count,
                         const Reduction& reduction,
                         std::span<const std::int64_t> shared_offsets = {}) = 0;

  /// `data` of every rank becomes root's.
  virtual void broadcast(void* data, std::size_t bytes, int root) = 0;

  /// `output` becomes the ranks' inputs one after the other; rank r gives bytes[r] bytes.
  virtual void allgather(const void* input, void* output, std::span<const std::size_t> bytes) = 0;

  /// `output` becomes the parts that the ranks have for this one, in the order of ranks. Rank r's
  /// `input` holds its parts in the order of receivers; bytes[r * size() + s] are for rank s.
  /// The buffers do not overlap.
  virtual void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) = 0;

  /// `output` becomes this rank's part of the reduction of the inputs, counts[rank()] elements.
  /// `input` holds the parts in the order of ranks. The buffers do not overlap.
  virtual void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                             const Reduction& reduction) = 0;

  /// `data`, tensors of the given lengths one after the other, becomes their adaptive sum over the
  /// ranks (collective/adasum.h).
  void adasum(void* data, std::span<const std::size_t> counts, DType dtype);

  virtual void barrier() = 0;

  /// Memory from which allreduce() in place needs no copy, freed with its last owner (which may
  /// outlive the communicator); null if there is no such memory. Thread: any.
  /// Errors: Error(kInternal) when there is none left.
  virtual std::shared_ptr<void> allocate_shared(std::size_t) { return nullptr; }

  /// Where [data, data + bytes) lies in such memory of this rank, or -1. Thread: any.
  virtual std::int64_t shared_offset(const void*, std::size_t) const { return -1; }
};

}  // namespace torch_ring
