// SPDX-License-Identifier: Apache-2.0
// request_of(): the requests of the public operations, made of torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/accelerator.h"
#include "bindings/torch_call.h"
#include "collective/communicator.h"
#include "core/error.h"
#include "engine/request.h"
#include "memory/block_pool.h"
#include "messages/message_request.h"

namespace torch_ring {

/// Throws Error(kInvalidArgument).
[[noreturn]] void refuse(const std::string& why);

/// Refuses a tensor without memory of its own, or on an unknown device. `what` begins the message,
/// here and below. Errors: Error(kInvalidArgument).
void check_tensor(const at::Tensor& tensor, const std::string& what);

/// The reason why the tensor has no memory with its values, if so: "is a DTensor, which has no
/// ...". Tensors that wrap others, or that stand for others in a trace, have a storage without
/// memory.
std::optional<std::string> lack_of_memory(const at::Tensor& tensor);

/// Refuses a tensor whose elements share memory, or that has no memory.
/// Errors: Error(kInvalidArgument).
void check_writable(const at::Tensor& tensor, const std::string& what);

/// Whether the tensor's memory holds its values, one after the other.
bool is_plain(const at::Tensor& tensor);

/// The values of `tensor` in memory, one after the other, with torch's lazy flags (negated,
/// conjugated, all zero) applied.
at::Tensor values_of(const at::Tensor& tensor);

/// Lets torch work for the caller of an operation on any thread: a waiting thread makes progress
/// for all callers, and may be in other modes of torch. While this lives, the thread is in none of
/// its own modes; it is in inference mode if `in_inference_mode`: for a new tensor, if the caller
/// was; for a written tensor, if it was made there.
class ForCaller {
 public:
  explicit ForCaller(bool in_inference_mode) : inference_(in_inference_mode) {}

 private:
  c10::impl::ForceDispatchKeyGuard no_modes_{c10::default_included_set, c10::default_excluded_set};
  c10::InferenceMode inference_;
  at::NoGradGuard no_grad_;
};

/// An uninitialised contiguous tensor of this shape for a result, with the dtype and device of
/// `like`. On the host, from 4 MiB on, its memory comes from a pool of pages, and returns there
/// with the tensor (memory/page_pool.h).
at::Tensor empty_result(const at::Tensor& like, at::IntArrayRef sizes);

/// The same with the shape and the layout of `like`, as at::empty_like(). A tensor with holes does
/// not come from the pool.
at::Tensor empty_result_like(const at::Tensor& like);

/// Keeps at most `most_bytes` in this process's pool; none before the first call.
void keep_results(std::size_t most_bytes);

/// The bytes in the pool now.
std::size_t kept_result_bytes();

/// Tensors and gradients' blocks in the shared memory of a host, from the communicator of one
/// process set.
/// Thread: any; gradient_blocks() and vacant_bytes() with the GIL.
class SharedTensors {
 public:
  using Log = std::function<void(const std::string&)>;

  /// `communicator`: null after shutdown. `log` takes a warning.
  SharedTensors(int rank, std::weak_ptr<HostCommunicator> communicator, Log log)
      : rank_(rank), communicator_(std::move(communicator)), log_(std::move(log)) {}

  /// A tensor whose allreduce copies nothing; an ordinary one if the ranks share no memory, or if
  /// it is full, which is logged once.
  at::Tensor empty(const std::vector<std::int64_t>& shape, at::TensorOptions options) const;

  /// Blocks for large gradients of all optimizers of the set.
  std::shared_ptr<BlockPool> gradient_blocks();

  /// The bytes of the blocks that wait for their next gradients.
  std::size_t vacant_bytes() const { return blocks_ ? blocks_->vacant_bytes() : 0; }

 private:
  const int rank_;
  const std::weak_ptr<HostCommunicator> communicator_;
  const Log log_;
  std::shared_ptr<BlockPool> blocks_;
  mutable std::atomic<bool> is_full_{false};  // and logged
};

/// The result of a request, valid when its work is done.
struct Result {
  at::Tensor tensor;
  std::vector<std::int64_t> rows;           // allgather and alltoall: received from each rank
  std::optional<OutputEvent> output_event;  // on a device
};

/// Refuses an op that the dtype does not have on `size` ranks. Errors: Error(kInvalidArgument).
void check_op(DType dtype, ReduceOp op, const std::string& what, int size);

/// `asked` with the dtype, device and shape of a tensor.
Fingerprint fingerprint_of(Fingerprint asked, const at::Tensor& tensor);

/// A Request::begin that keeps tensors for the stream that uses them.
std::function<void()> keeper(std::vector<at::Tensor> tensors);

/// The place of a rank in its set.
struct Place {
  int rank;
  int size;
};

/// The shape of a tensor with a part for each rank.
std::vector<std::int64_t> shape_of_parts(const at::Tensor& part, int size);

/// An uninitialised output for this rank: of a gather with the shape (size, *tensor.shape), of a
/// reducescatter for this rank's rows (scattered_rows()), otherwise like `tensor`.
at::Tensor output_for(Collective collective, const at::Tensor& tensor, Place place);

/// A request for the collective `asked`, with the options that are set there: its name, operator,
/// factors, root, and `joinable`. It checks the tensors, keeps them alive until the work is done,
/// and copies to and from contiguous memory where necessary. Errors: Error(kInvalidArgument).
///
/// `tensor`: of a scatter, undefined on all ranks but the root, where it has the shape (size,
/// *output.shape). `output`: like that of output_for(); of a reduce or gather, undefined on all
/// ranks but the root. An output of the same shape may be `tensor`.
Request request_of(Fingerprint asked, const at::Tensor& tensor, const at::Tensor& output,
                   Place place);

/// The same for an allreduce among `size` ranks.
inline Request allreduce_request(const at::Tensor& tensor, const at::Tensor& output,
                                 std::string name, int op, double prescale, double postscale,
                                 int size) {
  return request_of({.collective = Collective::kAllreduce,
                     .op = static_cast<ReduceOp>(op),
                     .prescale = prescale,
                     .postscale = postscale,
                     .name = std::move(name)},
                    tensor, output, {.rank = 0, .size = size});
}

/// The same for an allgather or alltoall: `result` becomes the received rows. `splits`: of an
/// alltoall, the number of rows for each rank; together at most the tensor's rows.
Request request_of_rows(Fingerprint asked, const at::Tensor& tensor,
                        std::vector<std::int64_t> splits, std::shared_ptr<Result> result, int size);

/// Both check the tensor, keep it until the request has ended, and copy it if its memory is not
/// contiguous. They set no deadline. A received tensor's version is bumped for autograd. Thread:
/// any, with or without the GIL. Errors: Error(kInvalidArgument); the tensor must be on the CPU.
MessageSpec send_spec(const at::Tensor& tensor, int destination, int tag);
MessageSpec receive_spec(const at::Tensor& tensor, std::optional<int> source, int tag);

}  // namespace torch_ring
