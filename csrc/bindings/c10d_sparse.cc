// sparse_allreduce_operation()
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/c10d_requests.h"
#include "bindings/requests.h"
#include "bindings/tensor_memory.h"

namespace torch_ring {

namespace {

std::string text_of(const at::Tensor& shape) {
  std::string text;
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    text += (i > 0 ? ", " : "[") + std::to_string(shape[i].item<std::int64_t>());
  }
  return text + "]";
}

/// The sum of the ranks' sparse tensors: all indices and values in one tensor, coalesced.
class SparseSum {
 public:
  explicit SparseSum(const at::Tensor& tensor)
      : tensor_(tensor), own_(tensor.detach().coalesce()) {}

  /// Two allgathers, a row for each entry. Before its indices a rank sends the shape.
  std::vector<Request> requests() {
    shape_ = at::tensor(own_.sizes().slice(0, static_cast<std::size_t>(own_.sparse_dim())),
                        own_.indices().options());
    const at::Tensor indices = at::cat({shape_.unsqueeze(0), own_.indices().t()});
    return {allgather_request(indices, indices_, "", false),
            allgather_request(own_.values().contiguous(), values_, "", false)};
  }

  /// One of the two is done.
  void gathered(LateError& error) {
    if (++gathered_ < 2) return;
    const ForCaller for_caller(tensor_.is_inference());
    Tensors indices;
    std::int64_t first = 0;
    for (std::size_t rank = 0; rank < indices_->rows.size(); ++rank) {
      const std::int64_t rows = indices_->rows[rank];
      const at::Tensor shape = indices_->tensor.select(0, first);
      if (!shape.equal(shape_)) {
        error.set(
            Error(ErrorKind::kMismatch, "allreduce of a sparse tensor: its sparse dimensions are " +
                                            text_of(shape_) + " here, and " + text_of(shape) +
                                            " on rank " + std::to_string(rank)));
        return;
      }
      indices.push_back(indices_->tensor.narrow(0, first + 1, rows - 1));
      first += rows;
    }
    tensor_.copy_(
        at::sparse_coo_tensor(at::cat(indices).t(), values_->tensor, own_.sizes()).coalesce());
  }

 private:
  at::Tensor tensor_;
  at::Tensor own_;
  at::Tensor shape_;  // of the sparse dimensions
  std::shared_ptr<Result> indices_ = std::make_shared<Result>();
  std::shared_ptr<Result> values_ = std::make_shared<Result>();
  int gathered_ = 0;  // by the progress thread
};

}  // namespace

C10dOperation sparse_allreduce_operation(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const std::string what = "allreduce of a sparse tensor";
  if (tensor.layout() != at::kSparse) refuse(what + ": the tensor is not sparse COO");
  if (op.op_ != c10d::ReduceOp::SUM) refuse(what + ": the operator must be SUM");
  const at::NoGradGuard no_grad;
  const auto sum = std::make_shared<SparseSum>(tensor);
  C10dOperation operation{{}, {tensor}, std::make_shared<LateError>()};
  operation.requests = sum->requests();
  for (Request& request : operation.requests) {
    request.finish = [sum, late_error = operation.late_error] { sum->gathered(*late_error); };
  }
  group(operation.requests);
  return operation;
}

}  // namespace torch_ring
