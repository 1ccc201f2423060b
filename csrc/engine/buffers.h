// Buffers: the memory operations of an executor, on the host or on a device.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/types.h"

namespace torch_ring {

struct Copy {
  void* to;
  const void* from;
  std::size_t count;  // elements
};

/// Memory of the kind that a communicator works on. On a device all operations are enqueued on the
/// communicator's stream, in the order of the calls.
/// Thread: the progress thread. Blocking: no. Errors: std::bad_alloc, or the device's.
class Buffers {
 public:
  virtual ~Buffers() = default;

  /// New memory, freed when the work that uses it has run.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;

  /// Memory for the tensors of a fused collective. It is valid until the next call.
  virtual void* fusion_buffer(std::size_t bytes) = 0;

  virtual void copy(std::span<const Copy> copies, DType dtype) = 0;

  /// Fills `data` with the identity of `op`, as core/reduce.h defines it.
  virtual void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) = 0;
};

class HostBuffers final : public Buffers {
 public:
  std::shared_ptr<void> allocate(std::size_t bytes) override;
  void* fusion_buffer(std::size_t bytes) override;
  void copy(std::span<const Copy> copies, DType dtype) override;
  void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) override;

 private:
  std::vector<std::byte> buffer_;
};

}  // namespace torch_ring
