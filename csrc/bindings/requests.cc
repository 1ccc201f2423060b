// SPDX-License-Identifier: Apache-2.0
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
           " bytes more: a tensor that does not fit is copied when it is reduced. Raise `ulimit "
           "-v`");
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

std::vector<std::int64_t> shape_of_parts(const at::Tensor& part, int size) {
  std::vector<std::int64_t> shape = part.sizes().vec();
  shape.insert(shape.begin(), size);
  return shape;
}

namespace {

/// The beginning of errors about a request: "allreduce 'a'".
std::string quoted(const Fingerprint& asked) {
  std::string what = name_of(asked.collective);
  if (!asked.name.empty()) what.append(" '").append(asked.name).append("'");
  return what;
}

/// The communicator's input for `tensor`. Adasum runs on the host.
at::Tensor input_of(const Fingerprint& fingerprint, const at::Tensor& tensor) {
  const at::Tensor values = values_of(tensor);
  return fingerprint.on_host() && !values.is_cpu() ? values.detach().cpu() : values;
}

/// Sets the request's input to `input`, which it keeps alive, and its output to `output`. Where
/// this needs a contiguous copy, the copy may be `input` if `in_place`.
void set_buffers(Request& request, const at::Tensor& input, const at::Tensor& output,
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

/// Whether the two have one dtype and one device.
bool is_like(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.device() == other.device();
}

/// The shape of this rank's rows of a reducescatter. Precondition: `whole` has rows.
std::vector<std::int64_t> shape_of_share(const at::Tensor& whole, Place place) {
  std::vector<std::int64_t> shape = whole.sizes().vec();
  shape[0] = scattered_rows(shape[0], place.size)[static_cast<std::size_t>(place.rank)];
  return shape;
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
  if (!is_like(parts, part) || parts.sizes() != shape_of_parts(part, size)) {
    refuse(what +
           ": the root's tensor of all parts must have the shape, dtype and device of one "
           "part, with a first dimension of " +
           std::to_string(size) + " more");
  }
}

/// Checks that the tensors, where this rank has both, fit one another.
void check_fit(Collective collective, const at::Tensor& tensor, const at::Tensor& output,
               Place place, const std::string& what) {
  switch (collective) {
    case Collective::kReducescatter:
      if (tensor.dim() == 0) refuse(what + ": a scalar has no first dimension to scatter");
      if (!is_like(output, tensor) || !output.is_contiguous() ||
          output.sizes() != shape_of_share(tensor, place)) {
        refuse(what + ": the output is not a contiguous tensor of this rank's rows");
      }
      break;
    case Collective::kGather:
      if (output.defined()) check_parts(output, tensor, place.size, what);
      break;
    case Collective::kScatter:
      if (!tensor.defined()) break;
      check_tensor(tensor, what);
      check_parts(tensor, output, place.size, what);
      break;
    default:
      if (!output.defined() || (output.sizes() == tensor.sizes() && is_like(output, tensor))) break;
      refuse(what + ": the output differs from the input in shape, dtype or device");
  }
}

/// Checks the rows that this rank sends to each, of those that it has.
void check_splits(std::span<const std::int64_t> splits, std::int64_t rows, int size,
                  const std::string& what) {
  if (splits.size() != static_cast<std::size_t>(size)) {
    refuse(what + ": there are " + std::to_string(splits.size()) + " splits for " +
           std::to_string(size) + " ranks");
  }
  std::int64_t left = rows;
  for (const std::int64_t split : splits) {
    if (split < 0) refuse(what + ": a split is negative");
    if (split > left) {
      refuse(what + ": the splits have more rows than the tensor, " + std::to_string(rows));
    }
    left -= split;
  }
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

Fingerprint fingerprint_of(Fingerprint asked, const at::Tensor& tensor) {
  asked.dtype = dtype_of(tensor);
  asked.device = static_cast<std::uint8_t>(tensor.device().type());
  asked.shape = tensor.sizes().vec();
  return asked;
}

std::function<void()> keeper(std::vector<at::Tensor> tensors) {
  return [tensors = std::move(tensors)] {
    for (const at::Tensor& tensor : tensors) keep_for_stream(tensor);
  };
}

at::Tensor output_for(Collective collective, const at::Tensor& tensor, Place place) {
  if (collective == Collective::kGather) {
    return empty_result(tensor, shape_of_parts(tensor, place.size));
  }
  if (collective != Collective::kReducescatter) return empty_result_like(tensor);
  if (tensor.dim() == 0) refuse("reducescatter: a scalar has no first dimension to scatter");
  return empty_result(tensor, shape_of_share(tensor, place));
}

Request request_of(Fingerprint asked, const at::Tensor& tensor, const at::Tensor& output,
                   Place place) {
  const std::string what = quoted(asked);
  const at::Tensor& own = asked.collective == Collective::kScatter ? output : tensor;
  check_tensor(own, what);
  check_fit(asked.collective, tensor, output, place, what);
  if (output.defined()) check_writable(output, what);
  if (has_root(asked.collective)) check_root(asked.root, place.size, what);
  Request request{.fingerprint = fingerprint_of(std::move(asked), own)};
  const Fingerprint& f = request.fingerprint;
  if (reduces(f.collective)) {
    if (f.op == ReduceOp::kAdasum && f.collective != Collective::kAllreduce) {
      refuse(what + ": Adasum is an op of allreduce");
    }
    check_op(f.dtype, f.op, what, place.size);
  }
  if (!output.defined()) {
    const at::Tensor input = input_of(f, tensor);
    request.input = input.const_data_ptr();
    if (!input.is_cpu()) request.begin = keeper({input});
    request.finish = [input] {};  // keeps it alive
  } else if (!tensor.defined()) {
    set_buffers(request, output, output);
    request.input = nullptr;
  } else {
    const bool in_place = output.is_same(tensor) || (output.sizes() == tensor.sizes() &&
                                                     output.data_ptr() == tensor.data_ptr());
    set_buffers(request, input_of(f, tensor), output, in_place);
  }
  return request;
}

Request request_of_rows(Fingerprint asked, const at::Tensor& tensor,
                        std::vector<std::int64_t> splits, std::shared_ptr<Result> result,
                        int size) {
  const std::string what = quoted(asked);
  const bool gathers = asked.collective == Collective::kAllgather;
  check_tensor(tensor, what);
  if (tensor.dim() == 0) {
    refuse(what + ": a scalar has no first dimension to " +
           (gathers ? "gather along: reshape(1)" : "split"));
  }
  if (gathers) {
    splits = {tensor.size(0)};
  } else {
    check_splits(splits, tensor.size(0), size, what);
  }
  Request request{.fingerprint = fingerprint_of(std::move(asked), tensor)};
  request.fingerprint.shape.erase(request.fingerprint.shape.begin());  // that of a row
  request.rows = std::move(splits);
  const at::Tensor input = values_of(tensor);
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
