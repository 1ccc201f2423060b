// SharedBuffers: shared memory, in which an allreduce in place needs no copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_ring {

/// Memory of this rank that the other ranks of its host have mapped.
/// Thread: any. Blocking: while the system looks for memory.
class SharedBuffers {
 public:
  virtual ~SharedBuffers() = default;

  /// New memory, freed with its last reference, which may outlive the communicator. Null if the
  /// address space set aside for it is used up. Errors: Error(kInternal) when no memory is left.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;

  /// Gives [data, data + bytes) pages of its own, which the other ranks do not reach, with the same
  /// content and at the same address: offset_of() is -1 from then on. Other threads may write to
  /// it meanwhile.
  virtual void isolate(const void* data, std::size_t bytes) noexcept = 0;

  /// The offset of [data, data + bytes) in the rank's shared memory, or -1 if it lies elsewhere.
  virtual std::int64_t offset_of(const void* data, std::size_t bytes) const = 0;
};

}  // namespace torch_ring
