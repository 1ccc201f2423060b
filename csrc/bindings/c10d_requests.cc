#include "bindings/c10d_requests.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/trunc.h>
#include <torch/version.h>

#include <string>
#include <utility>

#include "bindings/dtypes.h"
#include "bindings/joined_tensors.h"
#include "bindings/requests.h"
#include "bindings/streams.h"
#include "bindings/tensor_memory.h"

namespace torch_ring {

namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;  // its name before torch 2.13
#else
using c10d::PreMulSumSupplement;
#endif
using RedOp = c10d::ReduceOp::RedOpType;

/// An operator of torch.distributed as the engine has it, for tensors of a dtype.
ReduceOp operator_of(const c10d::ReduceOp& op, at::ScalarType dtype) {
  switch (op.op_) {
    case RedOp::SUM:  // of bools, as NCCL and gloo have it: whether one of them is true
      return dtype == at::kBool ? ReduceOp::kMax : ReduceOp::kSum;
    case RedOp::AVG:
      return ReduceOp::kAverage;
    case RedOp::PRODUCT:
      return ReduceOp::kProduct;
    case RedOp::MIN:
      return ReduceOp::kMin;
    case RedOp::MAX:
      return ReduceOp::kMax;
    case RedOp::BAND:
      return ReduceOp::kBand;
    case RedOp::BOR:
      return ReduceOp::kBor;
    case RedOp::BXOR:
      return ReduceOp::kBxor;
    case RedOp::PREMUL_SUM:
      return ReduceOp::kSum;
    default:
      refuse("unknown operator " + std::to_string(op.op_));
  }
}

/// This rank's part of a reduction: for PREMUL_SUM a copy, multiplied by the factor, of which each
/// rank may have one of its own. So it is not part of the request.
at::Tensor part_for(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* what) {
  if (op.op_ != RedOp::PREMUL_SUM) return tensor;
  const auto* const supplement = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) refuse("PREMUL_SUM has no factor");
  const bool is_tensor = supplement->tensor_factor.defined();
  const double factor =
      is_tensor ? supplement->tensor_factor.item<double>() : supplement->double_factor;
  check_tensor(tensor, what);
  check_op(dtype_of(tensor), ReduceOp::kSum, what, 1);
  const at::NoGradGuard no_grad;
  const bool is_whole = at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
  if (!is_whole) return tensor.detach().mul(factor);
  return tensor.detach().to(at::kDouble).mul_(factor).trunc_().to(tensor.scalar_type());
}

void set_operator(Request& request, const c10d::ReduceOp& op, const at::Tensor& tensor,
                  const char* what, int size) {
  const ReduceOp kind = operator_of(op, tensor.scalar_type());
  check_op(request.fingerprint.dtype, kind, what, size);
  request.fingerprint.op = kind;
}

void append(Tensors& to, const Tensors& from) { to.insert(to.end(), from.begin(), from.end()); }

/// Sets the functions of a request that reads `input` and writes `output`.
void set_lifetime(Request& request, const at::Tensor& input, const JoinedTensors& output) {
  if (!input.is_cpu()) request.begin = keeper({input, output.flat()});
  request.finish = [input, output] { output.write_back(); };
}

/// Copies the output to the tensors when the request is done.
void write_back_after(Request& request, const JoinedTensors& output) {
  request.finish = [finish = std::move(request.finish), output] {
    finish();
    output.write_back();
  };
}

/// A flat tensor as one part for each rank.
at::Tensor parts_of(const at::Tensor& flat, const at::Tensor& part, int size) {
  std::vector<std::int64_t> shape = part.sizes().vec();
  shape.insert(shape.begin(), size);
  return flat.view(shape);
}

/// The request of an allgather of one tensor, whole: a "row" is the whole tensor, so that its shape
/// is what the ranks agree on.
Request gather_request(const at::Tensor& input, const JoinedTensors& output) {
  const at::Tensor values = values_of(input.detach());
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAllgather, input, "");
  request.rows = {1};
  request.input = values.const_data_ptr();
  request.allocate = [memory = output.flat()](std::span<const std::int64_t>) {
    return memory.mutable_data_ptr();
  };
  set_lifetime(request, values, output);
  return request;
}

Request reduce_scatter_request(const JoinedTensors& output, const at::Tensor& input,
                               const c10d::ReduceOp& op, GroupPlace place) {
  constexpr const char* kWhat = "reduce_scatter";
  const at::Tensor parts = input.view({place.size, input.numel() / place.size});
  Request request;
  request.fingerprint = fingerprint_of(Collective::kReducescatter, parts, "");
  set_operator(request, op, input, kWhat, place.size);
  request.input = input.const_data_ptr();
  request.output = output.flat().mutable_data_ptr();
  set_lifetime(request, input, output);
  return request;
}

}  // namespace

C10dOperation allreduce_operation(const Tensors& tensors, const c10d::ReduceOp& op, int size) {
  C10dOperation operation{{}, tensors};
  for (const at::Tensor& tensor : tensors) {
    const auto kind = static_cast<int>(operator_of(op, tensor.scalar_type()));
    const at::Tensor part = part_for(op, tensor, "all_reduce");
    operation.requests.push_back(allreduce_request(part, tensor, "", kind, 1.0, 1.0, size));
  }
  group(operation.requests);
  return operation;
}

C10dOperation broadcast_operation(const Tensors& tensors, int root, int size) {
  C10dOperation operation{{}, tensors};
  for (const at::Tensor& tensor : tensors) {
    operation.requests.push_back(broadcast_request(tensor, tensor, root, size, ""));
  }
  group(operation.requests);
  return operation;
}

C10dOperation reduce_operation(const at::Tensor& tensor, const c10d::ReduceOp& op, int root,
                               GroupPlace place) {
  const auto kind = static_cast<int>(operator_of(op, tensor.scalar_type()));
  const at::Tensor part = part_for(op, tensor, "reduce");
  const at::Tensor output = place.rank == root ? tensor : at::Tensor();
  return {{reduce_request(part, output, root, "", kind, 1.0, 1.0, place.size)}, {tensor}};
}

C10dOperation gather_operation(const Tensors& outputs, const at::Tensor& input, int root,
                               GroupPlace place) {
  constexpr const char* kWhat = "gather";
  if (place.rank != root) {
    if (!outputs.empty()) refuse("gather: only the root has outputs");
    return {{gather_request(input, {}, root, "", place.size)}, {}};
  }
  check_tensor(input, kWhat);
  require_parts(kWhat, outputs, input, place.size);
  const JoinedTensors output = JoinedTensors::outputs(outputs, kWhat, &input);
  C10dOperation operation{
      {gather_request(input, parts_of(output.flat(), input, place.size), root, "", place.size)},
      outputs};
  write_back_after(operation.requests.front(), output);
  return operation;
}

C10dOperation scatter_operation(const at::Tensor& output, const Tensors& inputs, int root,
                                GroupPlace place) {
  constexpr const char* kWhat = "scatter";
  if (place.rank != root) {
    if (!inputs.empty()) refuse("scatter: only the root has inputs");
    return {{scatter_request({}, output, root, "", place.size)}, {output}};
  }
  check_tensor(output, kWhat);
  require_parts(kWhat, inputs, output, place.size);
  const at::Tensor input = JoinedTensors::inputs(inputs, kWhat).flat();
  const JoinedTensors target = JoinedTensors::outputs({output}, kWhat, &input);
  C10dOperation operation{
      {scatter_request(parts_of(input, output, place.size), target.flat().view(output.sizes()),
                       root, "", place.size)},
      {output}};
  write_back_after(operation.requests.front(), target);
  return operation;
}

C10dOperation allgather_operation(const TensorLists& outputs, const Tensors& inputs, int size) {
  constexpr const char* kWhat = "all_gather";
  require_as_many(kWhat, outputs.size(), inputs.size());
  C10dOperation operation;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], kWhat);
    require_parts(kWhat, outputs[i], inputs[i], size);
    operation.requests.push_back(
        gather_request(inputs[i], JoinedTensors::outputs(outputs[i], kWhat, &inputs[i])));
    append(operation.outputs, outputs[i]);
  }
  group(operation.requests);
  return operation;
}

C10dOperation allgather_into_operation(const Tensors& outputs, const Tensors& inputs, int size) {
  constexpr const char* kWhat = "all_gather_into_tensor";
  require_as_many(kWhat, outputs.size(), inputs.size());
  C10dOperation operation{{}, outputs};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], kWhat);
    require_like(kWhat, outputs[i], inputs[i]);
    if (outputs[i].numel() != inputs[i].numel() * size) {
      refuse(std::string(kWhat) + ": the output has " + std::to_string(outputs[i].numel()) +
             " elements, and the inputs of the " + std::to_string(size) + " ranks " +
             std::to_string(inputs[i].numel() * size));
    }
    operation.requests.push_back(
        gather_request(inputs[i], JoinedTensors::outputs({outputs[i]}, kWhat, &inputs[i])));
  }
  group(operation.requests);
  return operation;
}

C10dOperation reduce_scatter_operation(const Tensors& outputs, const TensorLists& inputs,
                                       const c10d::ReduceOp& op, GroupPlace place) {
  constexpr const char* kWhat = "reduce_scatter";
  require_as_many(kWhat, outputs.size(), inputs.size());
  C10dOperation operation{{}, outputs};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(outputs[i], kWhat);
    require_parts(kWhat, inputs[i], outputs[i], place.size);
    const at::Tensor input = part_for(op, JoinedTensors::inputs(inputs[i], kWhat).flat(), kWhat);
    operation.requests.push_back(reduce_scatter_request(
        JoinedTensors::outputs({outputs[i]}, kWhat, &input), input, op, place));
  }
  group(operation.requests);
  return operation;
}

C10dOperation reduce_scatter_into_operation(const Tensors& outputs, const Tensors& inputs,
                                            const c10d::ReduceOp& op, GroupPlace place) {
  constexpr const char* kWhat = "reduce_scatter_tensor";
  require_as_many(kWhat, outputs.size(), inputs.size());
  C10dOperation operation{{}, outputs};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_like(kWhat, outputs[i], inputs[i]);
    if (inputs[i].numel() != outputs[i].numel() * place.size) {
      refuse(std::string(kWhat) + ": the input has " + std::to_string(inputs[i].numel()) +
             " elements, not the output's " + std::to_string(outputs[i].numel()) +
             " for each of the " + std::to_string(place.size) + " ranks");
    }
    const at::Tensor input = part_for(op, JoinedTensors::inputs({inputs[i]}, kWhat).flat(), kWhat);
    operation.requests.push_back(reduce_scatter_request(
        JoinedTensors::outputs({outputs[i]}, kWhat, &input), input, op, place));
  }
  group(operation.requests);
  return operation;
}

C10dOperation barrier_operation() {
  C10dOperation operation;
  operation.requests.emplace_back().fingerprint.collective = Collective::kFence;
  return operation;
}

}  // namespace torch_ring
