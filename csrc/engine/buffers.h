// Buffers: the memory of a communicator, as an executor uses it.
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

/// Thread: the progress thread. On a device everything is enqueued in the order of the calls, as
/// the communicator's work is.
class Buffers {
 public:
  virtual ~Buffers() = default;

  /// New memory, freed when the work that uses it has run.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;

  /// The memory of a fused collective, until the next call.
  virtual void* fusion_buffer(std::size_t bytes) = 0;

  virtual void copy(std::span<const Copy> copies, DType dtype) = 0;

  /// As core/reduce.h says.
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
