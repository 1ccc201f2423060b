#include "engine/buffers.h"

#include <cstring>

#include "core/reduce.h"

namespace torch_ring {

std::shared_ptr<void> HostBuffers::allocate(std::size_t bytes) {
  return std::make_shared<std::byte[]>(bytes);
}

void* HostBuffers::fusion_buffer(std::size_t bytes) {
  if (buffer_.size() < bytes) buffer_.resize(bytes);
  return buffer_.data();
}

void HostBuffers::copy(std::span<const Copy> copies, DType dtype) {
  for (const auto& [to, from, count] : copies) {
    if (count > 0) std::memcpy(to, from, count * size_of(dtype));
  }
}

void HostBuffers::fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) {
  torch_ring::fill_identity(data, count, dtype, op);
}

}  // namespace torch_ring
