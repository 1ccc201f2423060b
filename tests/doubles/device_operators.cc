// SPDX-License-Identifier: Apache-2.0
// The device double's operators: those for its memory and streams, and the CPU's for the rest.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "counts.h"
#include "device_double.h"
#include "doubles/nccl_double.h"

namespace device_double {
namespace {

/// The same memory as a CPU tensor, which does not own it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(size, &device_memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(size, strides, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// Copies on the current stream without waiting for it, within the device or from pinned memory;
/// all other copies wait.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceGuard guard(to.is_cpu() ? from.device() : to.device());
  count(counts.copies);
  if (from.device() == to.device()) {
    enqueue([source = on_host(from), target = on_host(to)] { target.copy_(source); });
  } else if (non_blocking && from.is_cpu() && from.is_pinned()) {
    // Keeps `from` until it has been copied, as torch's own allocator of pinned memory does.
    enqueue([source = from.detach(), target = on_host(to)] { target.copy_(source); });
  } else {
    count(counts.host_waits);
    synchronize();
    on_host(to).copy_(on_host(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return to.copy_(from);
}

/// Calls `each` with the index of every tensor, on the current stream: in one launch for every
/// `kTensorsOfLaunch` tensors, as CUDA's multi_tensor_apply for two lists.
void launch_for_each(std::size_t tensors, const std::function<void(std::size_t)>& each) {
  constexpr std::size_t kTensorsOfLaunch = 64;
  for (std::size_t begin = 0; begin < tensors; begin += kTensorsOfLaunch) {
    count(counts.kernels);
    enqueue([begin, end = std::min(tensors, begin + kTensorsOfLaunch), each] {
      for (std::size_t i = begin; i < end; ++i) each(i);
    });
  }
}

/// Whether CUDA would copy all these tensors together; else it does so one by one.
bool is_batch(at::TensorList to, at::TensorList from) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    const bool alike = to[i].device() == to[0].device() && from[i].device() == to[0].device() &&
                       to[i].scalar_type() == to[0].scalar_type() &&
                       from[i].scalar_type() == from[0].scalar_type() &&
                       from[i].sizes() == to[i].sizes() && from[i].strides() == to[i].strides() &&
                       to[i].is_non_overlapping_and_dense();
    if (!alike) return false;
  }
  return true;
}

std::vector<at::Tensor> on_host(at::TensorList tensors) {
  std::vector<at::Tensor> hosts;
  for (const at::Tensor& tensor : tensors) hosts.push_back(on_host(tensor));
  return hosts;
}

void copy_each(at::TensorList to, at::TensorList from, bool non_blocking) {
  if (!is_batch(to, from)) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
    return;
  }
  const c10::DeviceGuard guard(to[0].device());
  launch_for_each(
      to.size(), [to = on_host(to), from = on_host(from)](std::size_t i) { to[i].copy_(from[i]); });
}

void zero_each(at::TensorList tensors) {
  const c10::DeviceGuard guard(tensors[0].device());
  launch_for_each(tensors.size(), [hosts = on_host(tensors)](std::size_t i) { hosts[i].zero_(); });
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  const c10::DeviceGuard guard(self.device());
  count(counts.kernels);
  enqueue([=, host = on_host(self)] { host.fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

/// Enqueued if it is by a number, as the engine's scaling is: that of a result stands behind a
/// collective which may never end. Other products wait, as all that on_cpu() runs.
at::Tensor& multiply(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  const c10::DeviceGuard guard(out.device());
  count(counts.kernels);
  const bool by_number = other.is_cpu() && other.dim() == 0;
  if (by_number && out.sizes() == self.sizes()) {
    enqueue([host = on_host(out), source = on_host(self), other] {
      at::Tensor target = host;
      at::mul_out(target, source, other);
    });
    return out;
  }
  synchronize();
  out.resize_(at::infer_size(self.sizes(), other.sizes()));
  at::Tensor host = on_host(out);
  at::mul_out(host, on_host(self), on_host(other));
  return out;
}

at::Scalar item(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  count(counts.copies);
  count(counts.host_waits);
  synchronize();
  return at::cpu::_local_scalar_dense(on_host(self));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

/// The device of the first tensor on a device among an operator's arguments, or the current one.
c10::Device device_of(const torch::jit::Stack& arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensorList() && argument.toTensorList().empty()) continue;
    if (!argument.isTensor() && !argument.isTensorList()) continue;
    const at::Tensor tensor =
        argument.isTensor() ? argument.toTensor() : argument.toTensorList().get(0);
    if (tensor.defined() && tensor.is_privateuseone()) return tensor.device();
  }
  return current_device();
}

/// Whether the host waits for an operator on a GPU: the shape of its result depends on values, or
/// its result is the host's.
bool waits_on_gpu(const std::string& name) {
  static const std::set<std::string> names{"aten::nonzero", "aten::masked_select", "aten::equal",
                                           "aten::_unique2"};
  return names.contains(name);
}

/// Runs an operator on the CPU, after waiting for the current stream (and no other).
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::DeviceGuard guard(device_of(*stack));
  if (waits_on_gpu(op.schema().name())) count(counts.host_waits);
  count(counts.kernels);
  const Uncounted own;
  synchronize();
  at::native::cpu_fallback(op, stack);
}

void delay(std::int64_t milliseconds) {
  enqueue([=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}

/// Stops the current stream until open_gate(), once.
std::int64_t close_gate() {
  auto* const gate = new std::promise<void>;
  enqueue([opened = std::shared_future<void>(gate->get_future())] { opened.wait(); });
  return reinterpret_cast<std::int64_t>(gate);
}

void open_gate(std::int64_t gate) {
  const std::unique_ptr<std::promise<void>> owned(reinterpret_cast<std::promise<void>*>(gate));
  owned->set_value();
}

/// `tensor.data = data` across devices, which torch allows to devices that it knows. As there, a
/// tensor's accumulator does not follow it to another device.
void set_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
      meta != nullptr && tensor.device() != data.device()) {
    const std::scoped_lock lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

/// The counts of this process: the members of Counts, and the launches of NCCL.
std::vector<std::int64_t> all_counts() {
  const NcclDoubleCounts& nccl = *nccl_double_counts();
  return {counts.kernels, counts.copies, counts.recorded, counts.awaited, counts.host_waits,
          nccl.launches,  nccl.threads,  nccl.polls,      nccl.sleeps};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using at::IntArrayRef;
  using at::Tensor;
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("fill_.Scalar", fill);
  library.impl("zero_", zero);
  library.impl("mul.out", multiply);
  library.impl("_foreach_copy_", copy_each);
  library.impl("_foreach_zero_", zero_each);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("resize_", TORCH_FN(at::native::resize_));
  // The generic ones would call a kernel of the device.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
  // Views do not read memory, so the CPU's fit.
  library.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  library.impl("view", TORCH_FN(at::cpu::view));
  library.impl("unfold", TORCH_FN(at::cpu::unfold));
  library.impl("_reshape_alias", TORCH_FN(at::cpu::_reshape_alias));
  library.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& {
    return at::cpu::set_(self, source);
  });
  library.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    return at::cpu::set_(self, std::move(source));
  });
  library.impl("set_.source_Storage_storage_offset",
               [](Tensor& self, at::Storage source, std::int64_t offset, IntArrayRef size,
                  IntArrayRef strides) -> Tensor& {
                 return at::cpu::set_(self, std::move(source), offset, size, strides);
               });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY(ringdouble, library) {
  library.def("delay(int milliseconds) -> ()", delay);
  library.def("close_gate() -> int", close_gate);
  library.def("host_waits() -> int", [] { return counts.host_waits.load(); });
  library.def("set_failed(bool fails) -> ()", fail);
  library.def("open_gate(int gate) -> ()", open_gate);
  library.def("counts() -> int[]", all_counts);
  library.def("set_data(Tensor tensor, Tensor data) -> ()", set_data);
}

}  // namespace
}  // namespace device_double
