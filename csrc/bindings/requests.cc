#include "bindings/requests.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "bindings/dtypes.h"
#include "bindings/result_allocator.h"
#include "bindings/streams.h"
#include "bindings/tensor_memory.h"

namespace torch_ring {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::kInvalidArgument, why); }

std::string quoted(const std::string& collective, const std::string& name) {
  return name.empty() ? collective : collective + " '" + name + "'";
}

void check_output(const at::Tensor& tensor, const at::Tensor& output, const std::string& what) {
  if (output.sizes() != tensor.sizes() || output.scalar_type() != tensor.scalar_type() ||
      output.device() != tensor.device()) {
    refuse(what + ": the output differs from the input in shape, dtype or device");
  }
  check_writable(output, what);
}

/// The communicator's input for `tensor`. Adasum runs on the host.
at::Tensor input_of(const Fingerprint& fingerprint, const at::Tensor& tensor) {
  const at::Tensor values = values_of(tensor);
  return fingerprint.on_host() && !values.is_cpu() ? values.detach().cpu() : values;
}

/// Sets the request's input to `input`, which it keeps alive, and its output to `output`, or to a
/// contiguous copy where needed, which may be `input` if `in_place`.
void set_buffers_to(Request& request, const at::Tensor& input, const at::Tensor& output,
                    bool in_place = false) {
  request.input = input.const_data_ptr();
  if (is_plain(output) && output.device() == input.device()) {
    request.output = output.mutable_data_ptr();
    if (!output.is_cpu()) request.begin = keeper({input, output});
    request.finish = [input, output] {};  // keeps them alive
    return;
  }
  const at::Tensor target = output.detach();
  const at::Tensor result = in_place ? input : empty_result(input, output.sizes());
  request.output = result.mutable_data_ptr();
  if (!input.is_cpu()) request.begin = keeper({input, result, target});
  request.finish = [input, result, target] {
    const ForCaller for_caller(target.is_inference());
    torch_call([&] {
      target.copy_(result);
      // The progress thread copies from the host, on a stream that the caller does not wait for.
      if (!result.device().is_cpu() || target.is_cpu()) return;
      current_stream(target.device()).synchronize();
    });
  };
}

/// The same for a `tensor` that may need a contiguous copy, too, and an `output` of its shape.
void set_buffers(Request& request, const at::Tensor& tensor, const at::Tensor& output) {
  const bool in_place = output.is_same(tensor) || output.data_ptr() == tensor.data_ptr();
  set_buffers_to(request, input_of(request.fingerprint, tensor), output, in_place);
}

/// Sets the input of a rank without an output.
void set_input(Request& request, const at::Tensor& input) {
  request.input = input.const_data_ptr();
  if (!input.is_cpu()) request.begin = keeper({input});
  request.finish = [input] {};  // keeps it alive
}

/// Refuses a root that is no rank.
void check_root(int root, int size, const std::string& what) {
  if (root >= 0 && root < size) return;
  refuse(what + ": root rank " + std::to_string(root) + " is not one of the " +
         std::to_string(size) + " ranks");
}

/// Checks that `parts` has `part`'s dtype and device, and its shape once for each rank.
void check_parts(const at::Tensor& parts, const at::Tensor& part, int size,
                 const std::string& what) {
  std::vector<std::int64_t> shape = part.sizes().vec();
  shape.insert(shape.begin(), size);
  if (parts.sizes() != shape || parts.scalar_type() != part.scalar_type() ||
      parts.device() != part.device()) {
    refuse(what +
           ": the root's tensor of all parts must have the shape, dtype and device of one "
           "part, with a first dimension of " +
           std::to_string(size) + " more");
  }
}

/// Sets the buffers of an allgather or an alltoall, whose output size depends on the other ranks.
/// Turns the fingerprint's shape into that of a row.
void set_ragged_buffers(Request& request, const at::Tensor& input, std::shared_ptr<Result> result) {
  request.fingerprint.shape.erase(request.fingerprint.shape.begin());
  request.input = input.const_data_ptr();
  request.begin = keeper({input});
  request.allocate = [input, result = std::move(result),
                      in_inference_mode =
                          c10::InferenceMode::is_enabled()](std::span<const std::int64_t> rows) {
    const ForCaller for_caller(in_inference_mode);
    std::vector<std::int64_t> shape = input.sizes().vec();
    shape[0] = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    result->rows.assign(rows.begin(), rows.end());
    result->tensor = torch_call([&] { return empty_result(input, shape); });
    keep_for_stream(result->tensor);
    return result->tensor.mutable_data_ptr();
  };
}

}  // namespace

void check_op(DType dtype, ReduceOp op, const std::string& what, int size) {
  const auto value = static_cast<int>(op);
  if (value < 0 || value >= kReduceOpCount) refuse(what + ": unknown op " + std::to_string(value));
  if (op == ReduceOp::kAdasum) {
    if (!std::has_single_bit(static_cast<unsigned>(size))) {
      refuse(what + ": op Adasum needs a power of two of ranks, not " + std::to_string(size));
    }
    if (!is_floating_point(dtype)) {
      refuse(what + ": op Adasum needs floating point, not " + name_of(dtype));
    }
    return;
  }
  check_reducible(dtype, op, what);
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

std::function<void()> keeper(std::vector<at::Tensor> tensors) {
  return [tensors = std::move(tensors)] {
    for (const at::Tensor& tensor : tensors) keep_for_stream(tensor);
  };
}

Request allreduce_request(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                          int op, double prescale, double postscale, int size) {
  const std::string what = quoted("allreduce", name);
  check_tensor(tensor, what);
  check_output(tensor, output, what);
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAllreduce, tensor, std::move(name));
  request.fingerprint.op = static_cast<ReduceOp>(op);
  request.fingerprint.prescale = prescale;
  request.fingerprint.postscale = postscale;
  check_op(request.fingerprint.dtype, request.fingerprint.op, what, size);
  set_buffers(request, tensor, output);
  return request;
}

Request broadcast_request(const at::Tensor& tensor, const at::Tensor& output, int root, int size,
                          std::string name) {
  const std::string what = quoted("broadcast", name);
  check_tensor(tensor, what);
  check_output(tensor, output, what);
  check_root(root, size, what);
  Request request;
  request.fingerprint = fingerprint_of(Collective::kBroadcast, tensor, std::move(name));
  request.fingerprint.root = root;
  set_buffers(request, tensor, output);
  return request;
}

Request allgather_request(const at::Tensor& tensor, std::shared_ptr<Result> result,
                          std::string name, bool joinable) {
  const std::string what = quoted("allgather", name);
  check_tensor(tensor, what);
  if (tensor.dim() == 0)
    refuse(what + ": a scalar has no first dimension to gather along: reshape(1)");
  const at::Tensor input = values_of(tensor);
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAllgather, tensor, std::move(name));
  request.fingerprint.joinable = joinable;
  request.rows = {tensor.size(0)};
  set_ragged_buffers(request, input, std::move(result));
  return request;
}

Request alltoall_request(const at::Tensor& tensor, std::vector<std::int64_t> splits,
                         std::shared_ptr<Result> result, std::string name, int size) {
  const std::string what = quoted("alltoall", name);
  check_tensor(tensor, what);
  if (tensor.dim() == 0) refuse(what + ": a scalar has no first dimension to split");
  if (splits.size() != static_cast<std::size_t>(size)) {
    refuse(what + ": there are " + std::to_string(splits.size()) + " splits for " +
           std::to_string(size) + " ranks");
  }
  std::int64_t left = tensor.size(0);
  for (const std::int64_t rows : splits) {
    if (rows < 0) refuse(what + ": a split is negative");
    if (rows > left) {
      refuse(what + ": the splits have more rows than the tensor, " +
             std::to_string(tensor.size(0)));
    }
    left -= rows;
  }
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAlltoall, tensor, std::move(name));
  request.rows = std::move(splits);
  set_ragged_buffers(request, values_of(tensor), std::move(result));
  return request;
}

Request reducescatter_request(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                              int op, double prescale, double postscale, int rank, int size) {
  const std::string what = quoted("reducescatter", name);
  check_tensor(tensor, what);
  if (tensor.dim() == 0) refuse(what + ": a scalar has no first dimension to scatter");
  check_writable(output, what);
  const auto rows = scattered_rows(tensor.size(0), size)[static_cast<std::size_t>(rank)];
  if (!output.is_contiguous() || output.device() != tensor.device() ||
      output.scalar_type() != tensor.scalar_type() || output.dim() != tensor.dim() ||
      output.size(0) != rows ||
      !std::equal(tensor.sizes().begin() + 1, tensor.sizes().end(), output.sizes().begin() + 1)) {
    refuse(what + ": the output is not a contiguous tensor of this rank's rows");
  }
  Request request;
  request.fingerprint = fingerprint_of(Collective::kReducescatter, tensor, std::move(name));
  request.fingerprint.op = static_cast<ReduceOp>(op);
  request.fingerprint.prescale = prescale;
  request.fingerprint.postscale = postscale;
  if (request.fingerprint.op == ReduceOp::kAdasum) refuse(what + ": Adasum is an op of allreduce");
  check_op(request.fingerprint.dtype, request.fingerprint.op, what, size);
  set_buffers_to(request, input_of(request.fingerprint, tensor), output);
  return request;
}

Request reduce_request(const at::Tensor& tensor, const at::Tensor& output, int root,
                       std::string name, int op, double prescale, double postscale, int size) {
  const std::string what = quoted("reduce", name);
  check_tensor(tensor, what);
  check_root(root, size, what);
  if (output.defined()) check_output(tensor, output, what);
  Request request;
  request.fingerprint = fingerprint_of(Collective::kReduce, tensor, std::move(name));
  request.fingerprint.root = root;
  request.fingerprint.op = static_cast<ReduceOp>(op);
  request.fingerprint.prescale = prescale;
  request.fingerprint.postscale = postscale;
  if (request.fingerprint.op == ReduceOp::kAdasum) refuse(what + ": Adasum is an op of allreduce");
  check_op(request.fingerprint.dtype, request.fingerprint.op, what, size);
  if (output.defined()) {
    set_buffers(request, tensor, output);
  } else {
    set_input(request, input_of(request.fingerprint, tensor));
  }
  return request;
}

Request gather_request(const at::Tensor& tensor, const at::Tensor& output, int root,
                       std::string name, int size) {
  const std::string what = quoted("gather", name);
  check_tensor(tensor, what);
  check_root(root, size, what);
  Request request;
  request.fingerprint = fingerprint_of(Collective::kGather, tensor, std::move(name));
  request.fingerprint.root = root;
  if (output.defined()) {
    check_parts(output, tensor, size, what);
    check_output(output, output, what);
    set_buffers_to(request, values_of(tensor), output);
  } else {
    set_input(request, values_of(tensor));
  }
  return request;
}

Request scatter_request(const at::Tensor& tensor, const at::Tensor& output, int root,
                        std::string name, int size) {
  const std::string what = quoted("scatter", name);
  check_tensor(output, what);
  check_output(output, output, what);
  check_root(root, size, what);
  Request request;
  request.fingerprint = fingerprint_of(Collective::kScatter, output, std::move(name));
  request.fingerprint.root = root;
  if (tensor.defined()) {
    check_tensor(tensor, what);
    check_parts(tensor, output, size, what);
    set_buffers_to(request, values_of(tensor), output);
  } else {
    set_buffers_to(request, output, output);
    request.input = nullptr;
  }
  return request;
}

Request barrier_request(std::string name, bool resets_numbering) {
  Request request;
  request.fingerprint.collective = resets_numbering ? Collective::kBarrier : Collective::kFence;
  request.fingerprint.name = std::move(name);
  return request;
}

Request join_request(const std::shared_ptr<Result>& result) {
  result->tensor = at::empty({}, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  Request request;
  request.fingerprint.collective = Collective::kJoin;
  request.fingerprint.name = kJoinKey;
  request.output = result->tensor.mutable_data_ptr();
  request.finish = [result] {};  // keeps it alive
  return request;
}

}  // namespace torch_ring
