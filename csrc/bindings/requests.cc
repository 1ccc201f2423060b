#include "bindings/requests.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/strides.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "bindings/accelerator.h"
#include "bindings/dtypes.h"
#include "memory/page_pool.h"

namespace torch_ring {

void refuse(const std::string& why) { throw Error(ErrorKind::kInvalidArgument, why); }

namespace {

void require_memory(const at::Tensor& tensor, const std::string& what) {
  if (const auto why = lack_of_memory(tensor)) refuse(what + ": the tensor " + *why);
}

}  // namespace

std::optional<std::string> lack_of_memory(const at::Tensor& tensor) {
  const bool has_storage = tensor.has_storage();
  if (has_storage && tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()) {
    return std::nullopt;
  }
  if (tensor.layout() != at::kStrided || tensor._is_zerotensor()) return std::nullopt;
  if (has_storage && tensor.sym_numel().maybe_as_int() == 0) return std::nullopt;
  if (has_storage && tensor.storage().sym_nbytes().maybe_as_int() == 0) {
    return "has no memory: its storage was resized to nothing";
  }
  const pybind11::gil_scoped_acquire gil;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  const std::string type = object ? Py_TYPE(object.ptr())->tp_name : "Tensor";
  if (!tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    return "has no memory: is this in vmap, jvp, functionalize or a trace?";
  }
  return "is a " + type + ", which has no memory of its own: give the tensor that it wraps " +
         "(to_local() of a DTensor), or leave the mode that made it";
}

void check_tensor(const at::Tensor& tensor, const std::string& what) {
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    refuse(what + ": the tensor is not dense: use to_dense(), or sparse_allreduce_async()");
  }
  if (!tensor.is_cpu() && !tensor.is_cuda() && !tensor.is_privateuseone()) {
    refuse(what + ": tensors on " + tensor.device().str() + " are not supported: use cpu or cuda");
  }
  if (tensor._fw_grad(0).defined()) refuse(what + ": forward-mode derivatives are not supported");
  if (tensor._is_zerotensor()) return;  // zeros without memory
  require_memory(tensor, what);
  const std::size_t needed =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                       static_cast<std::size_t>(tensor.storage_offset()));
  if (tensor.numel() > 0 && tensor.storage().nbytes() < needed) {
    refuse(what + ": the tensor's storage was resized and is too small for it");
  }
}

void check_writable(const at::Tensor& tensor, const std::string& what) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse(what +
           ": cannot write into an expanded tensor, of which several elements are one "
           "place in memory: clone() it");
  }
  if (tensor._is_zerotensor()) refuse(what + ": cannot write into a ZeroTensor: clone() it");
  require_memory(tensor, what);
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj() &&
         !tensor._is_zerotensor();
}

at::Tensor values_of(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;  // the usual case, with no other check
  const at::Tensor detached = tensor.detach();
  if (detached._is_zerotensor()) return at::zeros(detached.sizes(), detached.options());
  return detached.resolve_conj().resolve_neg().contiguous();
}

namespace {

// Bytes from which results lie in pooled pages. malloc() keeps the pages of smaller blocks.
constexpr std::size_t kLarge = 4u << 20;

class ResultAllocator final : public c10::Allocator {
 public:
  /// Never destroyed: tensors may outlive everything else.
  static ResultAllocator& instance() {
    static auto* const allocator = new ResultAllocator;
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    // A tensor of this allocator may have been resized to a small one.
    void* const data = bytes >= kLarge ? pages_.take(bytes) : nullptr;
    if (data == nullptr) return c10::GetCPUAllocator()->allocate(bytes);
    c10::DataPtr owner{data, data, &give_back, c10::kCPU};
    c10::profiledCPUMemoryReporter().New(data, PagePool::bytes_of(data));
    return owner;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  PagePool& pages() { return pages_; }

 private:
  static void give_back(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    instance().pages_.give_back(data);
  }

  PagePool pages_{0};
};

/// Whether a result of `numel` elements lies in kept pages. torch makes all results but plain
/// tensors on the host.
bool is_kept(const at::Tensor& like, std::int64_t numel) {
  return like.is_cpu() && like.layout() == at::kStrided && !like.is_nested() &&
         like.has_storage() && !like.unsafeGetTensorImpl()->is_python_dispatch() &&
         static_cast<std::size_t>(numel) * like.element_size() >= kLarge;
}

at::Tensor from_kept_pages(const at::Tensor& like, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &ResultAllocator::instance(),
                                                      c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      like.scalar_type()));
}

}  // namespace

at::Tensor empty_result(const at::Tensor& like, at::IntArrayRef sizes) {
  if (!is_kept(like, c10::multiply_integers(sizes))) return at::empty(sizes, like.options());
  return from_kept_pages(like, sizes, c10::contiguous_strides(sizes));
}

at::Tensor empty_result_like(const at::Tensor& like) {
  if (lack_of_memory(like)) return like;  // the request will refuse it
  if (!is_kept(like, like.numel()) || !like.is_non_overlapping_and_dense()) {
    return at::empty_like(like);
  }
  return from_kept_pages(like, like.sizes(), like.strides());
}

void keep_results(std::size_t most_bytes) { ResultAllocator::instance().pages().limit(most_bytes); }

std::size_t kept_result_bytes() { return ResultAllocator::instance().pages().kept_bytes(); }

at::Tensor SharedTensors::empty(const std::vector<std::int64_t>& shape,
                                at::TensorOptions options) const {
  const auto communicator = communicator_.lock();
  if (!communicator || !communicator->has_shared_memory()) return at::empty(shape, options);
  const std::size_t bytes =
      static_cast<std::size_t>(c10::multiply_integers(shape)) * options.dtype().itemsize();
  std::shared_ptr<void> memory = communicator->allocate_shared(bytes);
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
  // A resize allocates other memory, like that of an ordinary tensor: batched_powerSGD_hook()
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
      return alive ? alive->allocate_shared(bytes) : nullptr;
    });
  }
  return blocks_;
}

namespace {

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

/// Sets the request's input to `input`, which it keeps alive, and its output to `output`. Where
/// this needs a contiguous copy, the copy may be `input` if `in_place`.
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

/// Refuses a root that is not a rank.
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

/// Sets the buffers of an allgather or an alltoall whose output is given.
void set_given_buffers(Request& request, const at::Tensor& input, const at::Tensor& output) {
  request.input = input.const_data_ptr();
  request.allocate = [output](std::span<const std::int64_t>) { return output.mutable_data_ptr(); };
  if (!input.is_cpu()) request.begin = keeper({input, output});
  request.finish = [input, output] {};  // keeps them alive
}

/// Sets the buffers of an allgather or an alltoall, whose output size depends on the other ranks.
/// Reduces the fingerprint's shape to that of a row.
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

Request allgather_into_request(const at::Tensor& tensor, const at::Tensor& output,
                               std::string name) {
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAllgather, tensor, std::move(name));
  request.rows = {1};
  set_given_buffers(request, values_of(tensor.detach()), output);
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

Request alltoall_into_request(const at::Tensor& tensor, const at::Tensor& output,
                              std::vector<std::int64_t> row, Splits splits, std::string name) {
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAlltoall, tensor, std::move(name));
  request.fingerprint.shape = std::move(row);
  request.fingerprint.tells_expected = true;  // so that the ranks check the output's room
  request.rows = std::move(splits.sent);
  request.rows.insert(request.rows.end(), splits.received.begin(), splits.received.end());
  set_given_buffers(request, tensor, output);
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

namespace {

void check(const at::Tensor& tensor, const std::string& what) {
  if (!tensor.is_cpu()) {
    throw Error(ErrorKind::kInvalidArgument,
                what + ": messages are of tensors on the CPU, and this one is on " +
                    tensor.device().str() + ": copy it");
  }
  check_tensor(tensor, what);
}

/// A message of the contiguous `memory`, which it keeps.
MessageSpec spec_of(const at::Tensor& memory, std::optional<int> peer, int tag) {
  MessageSpec spec;
  spec.peer = peer;
  spec.tag = tag;
  spec.dtype = dtype_of(memory);
  spec.owner = std::make_shared<at::Tensor>(memory);
  return spec;
}

std::span<std::byte> bytes_of(const void* begin, std::size_t bytes) {
  // A send only reads: the same span serves both ends of a message.
  return {static_cast<std::byte*>(const_cast<void*>(begin)), bytes};
}

}  // namespace

MessageSpec send_spec(const at::Tensor& tensor, int destination, int tag) {
  check(tensor, "send");
  const at::Tensor values = values_of(tensor);
  MessageSpec spec = spec_of(values, destination, tag);
  spec.memory = bytes_of(values.const_data_ptr(), values.nbytes());
  return spec;
}

MessageSpec receive_spec(const at::Tensor& tensor, std::optional<int> source, int tag) {
  check(tensor, "receive");
  check_writable(tensor, "receive");
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  const at::Tensor target = tensor.detach();
  // A clone keeps the old values beyond the end of a shorter message.
  const at::Tensor memory = is_plain(target) ? target : target.clone(at::MemoryFormat::Contiguous);
  MessageSpec spec = spec_of(memory, source, tag);
  spec.is_send = false;
  spec.memory = bytes_of(memory.mutable_data_ptr(), memory.nbytes());
  if (!memory.is_same(target)) {
    spec.received = [target, memory] {
      const ForCaller for_caller(target.is_inference());
      torch_call([&] { target.copy_(memory); });
    };
  }
  return spec;
}

}  // namespace torch_ring
