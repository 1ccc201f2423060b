// allreduce_request(), ...: the requests of the public operations, made of torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/streams.h"
#include "engine/request.h"

namespace torch_ring {

/// The result of a request, valid when its work is done.
struct Result {
  at::Tensor tensor;
  std::vector<std::int64_t> rows;           // allgather and alltoall: received from each rank
  std::optional<OutputEvent> output_event;  // on a device
};

/// Refuses an op that the dtype does not have on `size` ranks. Errors: Error(kInvalidArgument).
void check_op(DType dtype, ReduceOp op, const std::string& what, int size);

/// What the ranks agree on of an operation of this tensor.
Fingerprint fingerprint_of(Collective collective, const at::Tensor& tensor, std::string name);

/// A Request::begin that keeps tensors for the stream that uses them.
std::function<void()> keeper(std::vector<at::Tensor> tensors);

/// Requests of the public operations. Each checks its tensors, keeps them alive until the work is
/// done, and copies to and from contiguous memory where it must.
/// Errors: Error(kInvalidArgument).
/// `size` is the number of ranks; `result->tensor` becomes the gathered rows.
Request allreduce_request(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                          int op, double prescale, double postscale, int size);
Request broadcast_request(const at::Tensor& tensor, const at::Tensor& output, int root, int size,
                          std::string name);
Request allgather_request(const at::Tensor& tensor, std::shared_ptr<Result> result,
                          std::string name, bool joinable);
/// `splits`: the rows for each rank; together at most those of the tensor.
Request alltoall_request(const at::Tensor& tensor, std::vector<std::int64_t> splits,
                         std::shared_ptr<Result> result, std::string name, int size);
/// `output` has this rank's rows (scattered_rows()).
Request reducescatter_request(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                              int op, double prescale, double postscale, int rank, int size);
/// `output`: undefined on all ranks but the root; may be `tensor`.
Request reduce_request(const at::Tensor& tensor, const at::Tensor& output, int root,
                       std::string name, int op, double prescale, double postscale, int size);
/// `output`: undefined on all ranks but the root, where it has the shape (size, *tensor.shape).
Request gather_request(const at::Tensor& tensor, const at::Tensor& output, int root,
                       std::string name, int size);
/// `tensor`: undefined on all ranks but the root, where it has the shape (size, *output.shape).
Request scatter_request(const at::Tensor& tensor, const at::Tensor& output, int root,
                        std::string name, int size);
/// A barrier, or without `resets_numbering` a fence.
Request barrier_request(std::string name, bool resets_numbering);
/// `result` becomes an int64 scalar: the last rank that joined.
Request join_request(const std::shared_ptr<Result>& result);

}  // namespace torch_ring
