#include "bindings/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <numeric>

namespace torch_ring {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::kInvalidArgument, why); }

std::string quoted(const std::string& collective, const std::string& name) {
  return name.empty() ? collective : collective + " '" + name + "'";
}

void check_on_cpu(const at::Tensor& tensor, const std::string& what) {
  if (tensor.layout() != at::kStrided) refuse(what + ": the tensor is not dense");
  if (!tensor.device().is_cpu()) {
    refuse(what + ": tensors on " + tensor.device().str() + " are not supported yet, only on cpu");
  }
}

void check_output(const at::Tensor& tensor, const at::Tensor& output, const std::string& what) {
  if (output.sizes() != tensor.sizes() || output.scalar_type() != tensor.scalar_type() ||
      output.device() != tensor.device()) {
    refuse(what + ": the output differs from the input in shape, dtype or device");
  }
}

/// What an allreduce of this dtype may do: booleans have no sum, and no average.
void check_op(DType dtype, ReduceOp op, const std::string& what) {
  const auto value = static_cast<int>(op);
  if (value < 0 || value > 5) refuse(what + ": unknown op " + std::to_string(value));
  if (op == ReduceOp::kAdasum) refuse(what + ": op Adasum is not supported yet");
  if (dtype == DType::kBool && (op == ReduceOp::kAverage || op == ReduceOp::kSum)) {
    refuse(what + ": bool tensors take Min, Max and Product, not " + name_of(op));
  }
}

Fingerprint fingerprint_of(Collective collective, const at::Tensor& tensor, std::string name) {
  Fingerprint fingerprint;
  fingerprint.collective = collective;
  fingerprint.dtype = dtype_of(tensor);
  fingerprint.device = static_cast<std::uint8_t>(tensor.device().type());
  fingerprint.shape = tensor.sizes().vec();
  fingerprint.name = std::move(name);
  return fingerprint;
}

/// Sets input and output to `tensor` and `output`, by way of contiguous copies where needed. The
/// closure that copies back is also what keeps the tensors alive.
void set_buffers(Request& request, const at::Tensor& tensor, const at::Tensor& output) {
  const at::Tensor input = tensor.detach().contiguous();
  const bool in_place = output.is_same(tensor) || output.data_ptr() == tensor.data_ptr();
  const at::Tensor target = output.detach();
  const at::Tensor result =
      target.is_contiguous() ? target : (in_place ? input : at::empty_like(input));
  request.input = input.const_data_ptr();
  request.output = result.mutable_data_ptr();
  request.finish = [input, result, target] {
    if (!result.is_same(target)) {
      const at::NoGradGuard no_grad;
      target.copy_(result);
    }
  };
}

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBool:
      return DType::kBool;
    default:
      refuse(std::string("dtype ") + c10::toString(tensor.scalar_type()) +
             " is not supported; use uint8, int8, int32, int64, float16, bfloat16, float32, "
             "float64 or bool");
  }
}

Request allreduce_request(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                          int op, double prescale, double postscale) {
  const std::string what = quoted("allreduce", name);
  check_on_cpu(tensor, what);
  check_output(tensor, output, what);
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAllreduce, tensor, std::move(name));
  request.fingerprint.op = static_cast<ReduceOp>(op);
  request.fingerprint.prescale = prescale;
  request.fingerprint.postscale = postscale;
  check_op(request.fingerprint.dtype, request.fingerprint.op, what);
  set_buffers(request, tensor, output);
  return request;
}

Request broadcast_request(const at::Tensor& tensor, const at::Tensor& output, int root, int size,
                          std::string name) {
  const std::string what = quoted("broadcast", name);
  check_on_cpu(tensor, what);
  check_output(tensor, output, what);
  if (root < 0 || root >= size) {
    refuse(what + ": root rank " + std::to_string(root) + " is not one of the " +
           std::to_string(size) + " ranks");
  }
  Request request;
  request.fingerprint = fingerprint_of(Collective::kBroadcast, tensor, std::move(name));
  request.fingerprint.root = root;
  set_buffers(request, tensor, output);
  return request;
}

Request allgather_request(const at::Tensor& tensor, std::shared_ptr<at::Tensor> result,
                          std::string name) {
  const std::string what = quoted("allgather", name);
  check_on_cpu(tensor, what);
  if (tensor.dim() == 0) refuse(what + ": a scalar has no first dimension to gather along");
  const at::Tensor input = tensor.detach().contiguous();
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAllgather, tensor, std::move(name));
  request.rows = tensor.size(0);
  request.fingerprint.shape.erase(request.fingerprint.shape.begin());
  request.input = input.const_data_ptr();
  request.allocate = [input, result](std::span<const std::int64_t> rows) {
    std::vector<std::int64_t> shape = input.sizes().vec();
    shape[0] = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    *result = at::empty(shape, input.options());
    return result->mutable_data_ptr();
  };
  return request;
}

Request barrier_request(std::string name) {
  Request request;
  request.fingerprint.collective = Collective::kBarrier;
  request.fingerprint.name = std::move(name);
  return request;
}

}  // namespace torch_ring
