// SPDX-License-Identifier: Apache-2.0
#include "c10d/c10d_requests.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <torch/version.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "bindings/accelerator.h"
#include "bindings/dtypes.h"
#include "bindings/sparse_sum.h"

namespace torch_ring {

void refuse_in_child_of(const HomeProcess& home) {
  if (!home.is_here()) refuse("a forked process has no part in the groups of its parent");
}

void require_as_many(const char* what, std::size_t outputs, std::size_t inputs) {
  if (outputs == inputs) return;
  refuse(std::string(what) + ": " + std::to_string(outputs) + " outputs for " +
         std::to_string(inputs) + " inputs");
}

void require_size(const char* what, std::size_t parts, int size) {
  if (parts == static_cast<std::size_t>(size)) return;
  refuse(std::string(what) + ": a list has " + std::to_string(parts) + " tensors for " +
         std::to_string(size) + " ranks");
}

void require_like(const char* what, const at::Tensor& part, const at::Tensor& whole) {
  if (part.scalar_type() == whole.scalar_type() && part.device() == whole.device()) return;
  refuse(std::string(what) + ": the output differs from the input in dtype or device");
}

void require_parts(const char* what, const Tensors& parts, const at::Tensor& own, int size) {
  require_size(what, parts.size(), size);
  for (const at::Tensor& part : parts) {
    require_like(what, part, own);
    if (part.numel() == own.numel()) continue;
    refuse(std::string(what) + ": a tensor of the list has " + std::to_string(part.numel()) +
           " elements, and the other one " + std::to_string(own.numel()));
  }
}

namespace {

std::int64_t elements_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  return count;
}

/// A flat tensor over tensors that lie one after the other in one storage; undefined for others.
at::Tensor flat_over(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.front();
  std::int64_t offset = first.storage_offset();
  for (const at::Tensor& tensor : tensors) {
    if (!is_plain(tensor) || tensor.storage_offset() != offset || !tensor.is_alias_of(first)) {
      return {};
    }
    offset += tensor.numel();
  }
  return first.detach().as_strided({elements_of(tensors)}, {1}, first.storage_offset());
}

void copy_to(const at::Tensor& to, const at::Tensor& from) {
  // Not by torch's copy_(): its threads would compete with the program's, and these copies run on
  // the progress thread.
  if (to.is_cpu() && from.is_cpu() && is_plain(to) && is_plain(from)) {
    if (to.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from.view(to.sizes()));
  }
}

}  // namespace

JoinedTensors::JoinedTensors(std::vector<at::Tensor> tensors, const char* what)
    : tensors_(std::move(tensors)) {
  if (tensors_.empty()) refuse(std::string(what) + ": the list of tensors is empty");
  const at::Tensor& first = tensors_.front();
  for (const at::Tensor& tensor : tensors_) {
    check_tensor(tensor, what);
    if (tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device()) {
      refuse(std::string(what) + ": the tensors of a list differ in dtype or device");
    }
  }
}

JoinedTensors JoinedTensors::inputs(const std::vector<at::Tensor>& tensors, const char* what) {
  const at::NoGradGuard no_grad;
  JoinedTensors joined(tensors, what);
  joined.flat_ = flat_over(joined.tensors_);
  joined.is_new_ = !joined.flat_.defined();
  if (!joined.is_new_) return joined;
  joined.flat_ = empty_result(tensors.front(), {elements_of(tensors)});
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor values = values_of(tensor.detach());
    copy_to(joined.flat_.narrow(0, offset, values.numel()), values.view({values.numel()}));
    offset += values.numel();
  }
  joined.tensors_.clear();
  return joined;
}

JoinedTensors JoinedTensors::outputs(const std::vector<at::Tensor>& tensors, const char* what,
                                     const at::Tensor* overlaps) {
  const at::NoGradGuard no_grad;
  JoinedTensors joined(tensors, what);
  for (at::Tensor& tensor : joined.tensors_) {
    check_writable(tensor, what);
    tensor = tensor.detach();
  }
  joined.flat_ = flat_over(joined.tensors_);
  joined.is_new_ = !joined.flat_.defined() || (overlaps && may_overlap(joined.flat_, *overlaps));
  if (joined.is_new_) joined.flat_ = empty_result(tensors.front(), {elements_of(tensors)});
  return joined;
}

void JoinedTensors::write_back() const {
  if (!is_new_) return;
  const ForCaller for_caller(tensors_.front().is_inference());
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors_) {
    copy_to(tensor, flat_.narrow(0, offset, tensor.numel()));
    offset += tensor.numel();
  }
}

bool may_overlap(const at::Tensor& one, const at::Tensor& other) {
  if (one.numel() == 0 || other.numel() == 0 || !one.is_alias_of(other)) return false;
  if (!one.is_contiguous() || !other.is_contiguous()) return true;
  const auto begin = [](const at::Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  return begin(one) < begin(other) + other.nbytes() && begin(other) < begin(one) + one.nbytes();
}

namespace {

/// The requests, as those of one operation that the program has called so: they run together.
C10dOperation as_called(Called called, C10dOperation operation) {
  const auto size = static_cast<std::uint32_t>(operation.requests.size());
  for (Request& request : operation.requests) {
    request.fingerprint.called = called;
    if (size > 1) request.fingerprint.group = size;
  }
  return operation;
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;  // its name before torch 2.13
#else
using c10d::PreMulSumSupplement;
#endif
using RedOp = c10d::ReduceOp::RedOpType;

/// The engine's operator for one of torch.distributed, for tensors of a dtype.
ReduceOp operator_of(const c10d::ReduceOp& op, at::ScalarType dtype) {
  switch (op.op_) {
    case RedOp::SUM:  // of bools, as in NCCL and gloo: whether any of them is true
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

/// This rank's input of a reduction: for PREMUL_SUM a copy, multiplied by the factor. Each rank may
/// have a factor of its own, so it is not part of the request.
at::Tensor part_for(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* what) {
  if (op.op_ != RedOp::PREMUL_SUM) return tensor;
  const auto* const supplement = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) refuse("PREMUL_SUM has no factor");
  const bool is_tensor = supplement->tensor_factor.defined();
  const double factor =
      is_tensor ? supplement->tensor_factor.item<double>() : supplement->double_factor;
  if (is_tensor && at::isIntegralType(supplement->tensor_factor.scalar_type(), false) &&
      (!is_whole(factor) ||
       static_cast<std::int64_t>(factor) != supplement->tensor_factor.item<std::int64_t>())) {
    refuse(std::string(what) + ": PREMUL_SUM's factor is not exact in float64");
  }
  check_tensor(tensor, what);
  check_op(dtype_of(tensor), ReduceOp::kSum, what, 1);
  const at::NoGradGuard no_grad;
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    return tensor.detach().mul(factor);
  }
  at::Tensor part = at::empty_like(tensor);
  scale(part, tensor.detach(), {.prescale = factor});
  return part;
}

void append(Tensors& to, const Tensors& from) { to.insert(to.end(), from.begin(), from.end()); }

/// Makes the request copy its output to the tensors when it is done.
Request written_back(Request request, const JoinedTensors& output) {
  request.finish = [finish = std::move(request.finish), output] {
    finish();
    torch_call([&] { output.write_back(); });
  };
  return request;
}

/// An allreduce or reduce, as `asked`, of this rank's part.
Request reduction(Fingerprint asked, const c10d::ReduceOp& op, const at::Tensor& tensor,
                  const at::Tensor& output, Place place, const char* what) {
  asked.op = operator_of(op, tensor.scalar_type());
  return request_of(std::move(asked), part_for(op, tensor, what), output, place);
}

/// An allgather or alltoall into memory with room for all rows. `rows`: Request::rows.
Request request_into(const JoinedTensors& output, const at::Tensor& input, Fingerprint asked,
                     std::vector<std::int64_t> rows) {
  Request request{.fingerprint = std::move(asked), .rows = std::move(rows)};
  const at::Tensor& memory = output.flat();
  request.input = input.const_data_ptr();
  request.allocate = [memory](std::span<const std::int64_t>) { return memory.mutable_data_ptr(); };
  if (!input.is_cpu()) request.begin = keeper({input, memory});
  request.finish = [input, output] { torch_call([&] { output.write_back(); }); };
  return request;
}

/// A whole tensor is a row, so that the ranks agree on its shape.
Request allgather_into(const Tensors& outputs, const at::Tensor& input, const char* what) {
  return request_into(JoinedTensors::outputs(outputs, what, &input), values_of(input.detach()),
                      fingerprint_of({.collective = Collective::kAllgather}, input), {1});
}

Request reduce_scatter(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op,
                       Place place, const char* what) {
  const at::Tensor input = part_for(op, JoinedTensors::inputs(inputs, what).flat(), what);
  const JoinedTensors target = JoinedTensors::outputs({output}, what, &input);
  const std::int64_t count = input.numel() / place.size;
  const Fingerprint asked{.collective = Collective::kReducescatter,
                          .op = operator_of(op, input.scalar_type())};
  const at::Tensor own = target.flat().view({1, count});
  return written_back(request_of(asked, input.view({place.size, count}), own, place), target);
}

}  // namespace

C10dOperation allreduce_operation(const Tensors& tensors, const c10d::ReduceOp& op, Place place) {
  C10dOperation operation{{}, tensors};
  for (const at::Tensor& tensor : tensors) {
    operation.requests.push_back(
        reduction({.collective = Collective::kAllreduce}, op, tensor, tensor, place, "all_reduce"));
  }
  return as_called(Called::kAllReduce, std::move(operation));
}

C10dOperation broadcast_operation(const Tensors& tensors, int root, Place place) {
  C10dOperation operation{{}, tensors};
  for (const at::Tensor& tensor : tensors) {
    operation.requests.push_back(
        request_of({.collective = Collective::kBroadcast, .root = root}, tensor, tensor, place));
  }
  return as_called(Called::kOwn, std::move(operation));
}

C10dOperation reduce_operation(const at::Tensor& tensor, const c10d::ReduceOp& op, int root,
                               Place place) {
  const Fingerprint asked{.collective = Collective::kReduce, .root = root};
  const at::Tensor output = place.rank == root ? tensor : at::Tensor();
  return {{reduction(asked, op, tensor, output, place, "reduce")}, {tensor}};
}

C10dOperation gather_operation(const Tensors& outputs, const at::Tensor& input, int root,
                               Place place) {
  constexpr const char* kWhat = "gather";
  const Fingerprint asked{.collective = Collective::kGather, .root = root};
  if (place.rank != root) {
    if (!outputs.empty()) refuse("gather: only the root has outputs");
    return {{request_of(asked, input, {}, place)}, {}};
  }
  check_tensor(input, kWhat);
  require_parts(kWhat, outputs, input, place.size);
  const JoinedTensors output = JoinedTensors::outputs(outputs, kWhat, &input);
  const at::Tensor parts = output.flat().view(shape_of_parts(input, place.size));
  return {{written_back(request_of(asked, input, parts, place), output)}, outputs};
}

C10dOperation scatter_operation(const at::Tensor& output, const Tensors& inputs, int root,
                                Place place) {
  constexpr const char* kWhat = "scatter";
  const Fingerprint asked{.collective = Collective::kScatter, .root = root};
  if (place.rank != root) {
    if (!inputs.empty()) refuse("scatter: only the root has inputs");
    return {{request_of(asked, {}, output, place)}, {output}};
  }
  check_tensor(output, kWhat);
  require_parts(kWhat, inputs, output, place.size);
  const at::Tensor input = JoinedTensors::inputs(inputs, kWhat).flat();
  const JoinedTensors target = JoinedTensors::outputs({output}, kWhat, &input);
  const at::Tensor parts = input.view(shape_of_parts(output, place.size));
  const at::Tensor own = target.flat().view(output.sizes());
  return {{written_back(request_of(asked, parts, own, place), target)}, {output}};
}

C10dOperation allgather_operation(const TensorLists& outputs, const Tensors& inputs, Place place) {
  constexpr const char* kWhat = "all_gather";
  require_as_many(kWhat, outputs.size(), inputs.size());
  C10dOperation operation;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], kWhat);
    require_parts(kWhat, outputs[i], inputs[i], place.size);
    operation.requests.push_back(allgather_into(outputs[i], inputs[i], kWhat));
    append(operation.outputs, outputs[i]);
  }
  return as_called(Called::kAllGather, std::move(operation));
}

C10dOperation allgather_into_operation(const Tensors& outputs, const Tensors& inputs, Place place) {
  constexpr const char* kWhat = "all_gather_into_tensor";
  require_as_many(kWhat, outputs.size(), inputs.size());
  C10dOperation operation{{}, outputs};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], kWhat);
    require_like(kWhat, outputs[i], inputs[i]);
    if (outputs[i].numel() != inputs[i].numel() * place.size) {
      refuse(std::string(kWhat) + ": the output has " + std::to_string(outputs[i].numel()) +
             " elements, and the inputs of the " + std::to_string(place.size) + " ranks " +
             std::to_string(inputs[i].numel() * place.size));
    }
    operation.requests.push_back(allgather_into({outputs[i]}, inputs[i], kWhat));
  }
  return as_called(Called::kAllGatherIntoTensor, std::move(operation));
}

C10dOperation reduce_scatter_operation(const Tensors& outputs, const TensorLists& inputs,
                                       const c10d::ReduceOp& op, Place place) {
  constexpr const char* kWhat = "reduce_scatter";
  require_as_many(kWhat, outputs.size(), inputs.size());
  C10dOperation operation{{}, outputs};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(outputs[i], kWhat);
    require_parts(kWhat, inputs[i], outputs[i], place.size);
    operation.requests.push_back(reduce_scatter(outputs[i], inputs[i], op, place, kWhat));
  }
  return as_called(Called::kReduceScatter, std::move(operation));
}

C10dOperation reduce_scatter_into_operation(const Tensors& outputs, const Tensors& inputs,
                                            const c10d::ReduceOp& op, Place place) {
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
    operation.requests.push_back(reduce_scatter(outputs[i], {inputs[i]}, op, place, kWhat));
  }
  return as_called(Called::kReduceScatterTensor, std::move(operation));
}

C10dOperation barrier_operation(Place) {
  return as_called(Called::kBarrier, {{{.fingerprint = {.collective = Collective::kFence}}}, {}});
}

namespace {

/// A row has the shape `row`. The ranks check that the output has room: each tells the others what
/// it expects.
Request alltoall_into(const Tensors& outputs, const at::Tensor& input,
                      std::vector<std::int64_t> row, std::vector<std::int64_t> sent,
                      const std::vector<std::int64_t>& received, const char* what) {
  Fingerprint asked =
      fingerprint_of({.collective = Collective::kAlltoall, .tells_expected = true}, input);
  asked.shape = std::move(row);
  sent.insert(sent.end(), received.begin(), received.end());
  return request_into(JoinedTensors::outputs(outputs, what, &input), input, std::move(asked),
                      std::move(sent));
}

std::vector<std::int64_t> rows_of(const at::Tensor& tensor, std::vector<std::int64_t> splits,
                                  const char* which, int size) {
  const std::string what = std::string("all_to_all_single: the ") + which;
  if (tensor.dim() == 0) refuse(what + " is a scalar, which has no first dimension to split");
  if (splits.empty()) {
    if (tensor.size(0) % size != 0) {
      refuse(what + "'s first dimension, " + std::to_string(tensor.size(0)) +
             ", is not divisible by the " + std::to_string(size) + " ranks: give split sizes");
    }
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), tensor.size(0) / size);
  }
  if (splits.size() != static_cast<std::size_t>(size)) {
    refuse(what + " has " + std::to_string(splits.size()) + " split sizes for " +
           std::to_string(size) + " ranks");
  }
  std::int64_t rows = 0;
  for (const std::int64_t split : splits) {
    if (split < 0) refuse(what + " has a negative split size");
    rows += split;
  }
  if (rows != tensor.size(0)) {
    refuse(what + "'s split sizes do not sum up to its first dimension: " + std::to_string(rows) +
           " and " + std::to_string(tensor.size(0)));
  }
  return splits;
}

}  // namespace

C10dOperation alltoall_operation(const Tensors& outputs, const Tensors& inputs, Place place) {
  constexpr const char* kWhat = "all_to_all";
  require_size(kWhat, outputs.size(), place.size);
  require_size(kWhat, inputs.size(), place.size);
  require_like(kWhat, outputs.front(), inputs.front());
  const auto counts = [](const Tensors& tensors) {
    std::vector<std::int64_t> rows;
    for (const at::Tensor& tensor : tensors) rows.push_back(tensor.numel());
    return rows;
  };
  const at::Tensor input = JoinedTensors::inputs(inputs, kWhat).flat();
  return as_called(
      Called::kAllToAll,
      {{alltoall_into(outputs, input, {}, counts(inputs), counts(outputs), kWhat)}, outputs});
}

C10dOperation alltoall_into_operation(const at::Tensor& output, const at::Tensor& input,
                                      std::vector<std::int64_t> output_splits,
                                      std::vector<std::int64_t> input_splits, Place place) {
  constexpr const char* kWhat = "all_to_all_single";
  require_like(kWhat, output, input);
  const std::vector<std::int64_t> received =
      rows_of(output, std::move(output_splits), "output", place.size);
  const std::vector<std::int64_t> sent =
      rows_of(input, std::move(input_splits), "input", place.size);
  const std::vector<std::int64_t> row = input.sizes().slice(1).vec();
  if (output.sizes().slice(1).vec() != row) {
    refuse(std::string(kWhat) + ": the rows of the output and of the input differ in shape");
  }
  const at::Tensor values = JoinedTensors::inputs({input}, kWhat).flat();
  return as_called(Called::kAllToAllSingle,
                   {{alltoall_into({output}, values, row, sent, received, kWhat)}, {output}});
}

namespace {

/// A sum that replaces the tensor when both allgathers are done.
class SparseAllreduce {
 public:
  SparseAllreduce(std::string what, const at::Tensor& tensor, int size)
      : what_(std::move(what)), tensor_(tensor), own_(tensor.detach().coalesce()), ranks_(size) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }

  std::vector<Request> requests() const {
    const SparseMessage message = sparse_message(own_, own_, ReduceOp::kSum);
    const Fingerprint asked{.collective = Collective::kAllgather};
    const int size = static_cast<int>(ranks_.size());
    return {request_of_rows(asked, message.header, {}, headers_, size),
            request_of_rows(asked, message.values, {}, values_, size)};
  }

  /// Called when one of the two is done.
  void gathered(LateError& error) {
    if (++gathered_ < 2) return;
    const ForCaller for_caller(tensor_.is_inference());
    try {
      const at::Tensor sum =
          sparse_sum(what_, ReduceOp::kSum, own_, ranks_,
                     {headers_->tensor, headers_->rows, values_->tensor}, std::nullopt);
      tensor_.copy_(sum.coalesce());
    } catch (const Error& mismatch) {
      error.set(mismatch);
    }
  }

 private:
  std::string what_;
  at::Tensor tensor_;
  at::Tensor own_;
  std::vector<int> ranks_;
  std::shared_ptr<Result> headers_ = std::make_shared<Result>();
  std::shared_ptr<Result> values_ = std::make_shared<Result>();
  int gathered_ = 0;  // by the progress thread
};

}  // namespace

C10dOperation sparse_allreduce_operation(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                         Place place) {
  const std::string what = "allreduce of a sparse tensor";
  if (tensor.layout() != at::kSparse) refuse(what + ": the tensor is not sparse COO");
  if (op.op_ != c10d::ReduceOp::SUM) refuse(what + ": the operator must be SUM");
  const at::NoGradGuard no_grad;
  const auto sum = std::make_shared<SparseAllreduce>(what, tensor, place.size);
  C10dOperation operation{{}, {tensor}, std::make_shared<LateError>()};
  operation.requests = sum->requests();
  for (Request& request : operation.requests) {
    request.finish = [sum, late_error = operation.late_error] {
      torch_call([&] { sum->gathered(*late_error); });
    };
  }
  return as_called(Called::kAllReduce, std::move(operation));
}

}  // namespace torch_ring
