// SharedTensors: tensors and gradients' blocks in the memory that the ranks of a host share.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/communicator.h"
#include "memory/block_pool.h"

namespace torch_ring {

/// What one process set's communicator has of that memory.
/// Thread: any; of gradient_blocks() and vacant_bytes() one at a time (the GIL's).
class SharedTensors {
 public:
  using Log = std::function<void(const std::string&)>;

  /// `communicator`: null after shutdown. `log` takes a warning.
  SharedTensors(int rank, std::weak_ptr<HostCommunicator> communicator, Log log)
      : rank_(rank), communicator_(std::move(communicator)), log_(std::move(log)) {}

  /// A tensor whose allreduce copies nothing; an ordinary one where the ranks share no memory, and
  /// where it has no room, of which the log is told once.
  at::Tensor empty(const std::vector<std::int64_t>& shape, at::TensorOptions options) const;

  /// Blocks for large gradients of all optimizers of the set.
  std::shared_ptr<BlockPool> gradient_blocks();

  /// Of these, those that wait for their next gradients.
  std::size_t vacant_bytes() const { return blocks_ ? blocks_->vacant_bytes() : 0; }

 private:
  const int rank_;
  const std::weak_ptr<HostCommunicator> communicator_;
  const Log log_;
  std::shared_ptr<BlockPool> blocks_;
  mutable std::atomic<bool> is_full_{false};  // and the log says so
};

}  // namespace torch_ring
