#include "bindings/shared_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

namespace torch_ring {

at::Tensor SharedTensors::empty(const std::vector<std::int64_t>& shape,
                                at::TensorOptions options) const {
  const auto communicator = communicator_.lock();
  SharedBuffers* const shared = communicator ? communicator->shared_buffers() : nullptr;
  if (!shared) return at::empty(shape, options);
  const std::size_t bytes =
      static_cast<std::size_t>(c10::multiply_integers(shape)) * options.dtype().itemsize();
  std::shared_ptr<void> memory = shared->allocate(bytes);
  if (!memory) {
    if (!is_full_.exchange(true)) {
      log_("rank " + std::to_string(rank_) + ": its part of the shared memory has no room for " +
           std::to_string(bytes) +
           " bytes more: a tensor that does not fit is copied when it is reduced. Raise "
           "TORCH_RING_ADDRESS_SPACE and `ulimit -v`");
    }
    return at::empty(shape, options);
  }
  void* data = memory.get();
  // A resize takes other memory, as it would of a tensor of torch's own: batched_powerSGD_hook()
  // resizes DDP's buckets.
  return at::for_blob(data, shape)
      .deleter([memory = std::move(memory)](void*) {})
      .options(options)
      .allocator(c10::GetAllocator(c10::DeviceType::CPU))
      .resizeable_storage()
      .make_tensor();
}

std::shared_ptr<BlockPool> SharedTensors::gradient_blocks() {
  if (!blocks_) {
    blocks_ = BlockPool::make([communicator = communicator_](std::size_t bytes) {
      const auto alive = communicator.lock();
      return alive ? alive->shared_buffers()->allocate(bytes) : nullptr;
    });
  }
  return blocks_;
}

}  // namespace torch_ring
