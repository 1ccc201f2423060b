// Communicator: collectives among fixed ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

  /// output[i] = the reduction of input[i] over the ranks; `input` may be `output`.
  /// `shared_offsets`: empty, or the SharedBuffers::offset_of() of every rank's buffer (then input
  /// == output and nothing is staged).
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
};

}  // namespace torch_ring
