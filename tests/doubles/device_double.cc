// A stand-in for a GPU, as torch's device type PrivateUse1: its memory is the host's, its streams
// are those of the NCCL double, which are also what native_handle() of a stream is. What is not
// synchronized really races, and what is freed too early really is garbage. Tests only.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "doubles/nccl_double.h"

namespace {

using Queue = torch_ring::nccl::Stream;

constexpr c10::DeviceIndex kDevices = 2;
constexpr int kPoison = 0xCD;
// Freed memory stays poisoned until this much has been freed after it.
constexpr std::size_t kQuarantineBytes = 64 << 20;

void enqueue(Queue queue, std::function<void()> task) {
  nccl_double_stream_enqueue(
      queue,
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> owned(
            static_cast<std::function<void()>*>(argument));
        (*owned)();
      },
      new std::function<void()>(std::move(task)));
}

// --- devices and streams

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_stream{};

c10::Device device_of(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }

/// The streams of one device; the first is the default one. They live as long as the process.
class Streams {
 public:
  Streams() { add(); }

  c10::StreamId add() {
    const std::scoped_lock lock(mutex_);
    queues_.push_back(nccl_double_stream_create());
    return static_cast<c10::StreamId>(queues_.size()) - 1;
  }

  Queue at(c10::StreamId id) {
    const std::scoped_lock lock(mutex_);
    return queues_.at(static_cast<std::size_t>(id));
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    const std::vector<Queue> queues = queues_;
    lock.unlock();
    for (Queue queue : queues) nccl_double_stream_synchronize(queue);
  }

  static Streams& of(c10::DeviceIndex device) {
    static auto* const streams = new std::array<Streams, kDevices>;
    return streams->at(static_cast<std::size_t>(device));
  }

 private:
  std::mutex mutex_;
  std::vector<Queue> queues_;
};

Queue queue_of(const c10::Stream& stream) {
  return Streams::of(stream.device_index()).at(stream.id());
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

Queue current_queue(c10::DeviceIndex device) {
  return Streams::of(device).at(current_stream.at(static_cast<std::size_t>(device)));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device_of(current_device); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "the double has ", int{kDevices}, " devices");
    return device_of(std::exchange(current_device, index_of(device)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Streams::of(device).synchronize();
  }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, device_of(index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream.at(static_cast<std::size_t>(index_of(device))));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return stream(device, Streams::of(index_of(device)).add());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = getStream(stream.device());
    current_stream.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    return nccl_double_stream_query(queue_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    nccl_double_stream_synchronize(queue_of(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = nccl_double_event_create();
    nccl_double_event_record(*event, queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) nccl_double_event_wait(event, queue_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || nccl_double_event_query(event); }
  void synchronizeEvent(void* event) const override {
    if (event) nccl_double_event_synchronize(event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) nccl_double_event_destroy(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- memory

/// Memory that belongs to one stream: its order says when the memory is free.
struct Block {
  std::byte* data;
  std::size_t bytes;
  Queue owner;
  std::mutex mutex;
  std::vector<Queue> users;  // other streams, which the owner waits for
};

/// Keeps poisoned memory for a while, so that who still reads it sees the poison.
void quarantine(std::byte* data, std::size_t bytes) {
  static auto* const mutex = new std::mutex;
  static auto* const freed = new std::deque<std::pair<std::byte*, std::size_t>>;
  static std::size_t total = 0;
  std::memset(data, kPoison, bytes);
  const std::scoped_lock lock(*mutex);
  freed->emplace_back(data, bytes);
  total += bytes;
  while (total > kQuarantineBytes) {
    const auto [oldest, size] = freed->front();
    freed->pop_front();
    total -= size;
    std::free(oldest);
  }
}

void release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  void* const event = nccl_double_event_create();
  for (Queue user : block->users) {
    nccl_double_event_record(event, user);
    nccl_double_event_wait(event, block->owner);
  }
  nccl_double_event_destroy(event);
  enqueue(block->owner, [data = block->data, bytes = block->bytes] { quarantine(data, bytes); });
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  if (auto* const block = data.cast_context<Block>(&release)) {
    const std::scoped_lock lock(block->mutex);
    if (queue_of(stream) != block->owner) block->users.push_back(queue_of(stream));
  }
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device = device_of(current_device);
    if (bytes == 0) return {nullptr, device};
    constexpr std::size_t kAlignment = 64;
    auto* data = static_cast<std::byte*>(
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    TORCH_CHECK(data, "the double is out of memory");
    std::memset(data, kPoison, bytes);
    return {data, new Block{data, bytes, current_queue(current_device), {}, {}}, &release, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    enqueue(current_queue(current_device), [=] { std::memcpy(to, from, bytes); });
  }
};

Memory memory;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &memory)

/// Memory of the host that the device copies from without the host waiting.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* const data = std::malloc(bytes);
    TORCH_CHECK(data, "the double is out of memory");
    const std::scoped_lock lock(mutex());
    blocks().insert(data);
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static bool has(const void* data) {
    const std::scoped_lock lock(mutex());
    return blocks().contains(data);
  }

 private:
  static void release(void* data) {
    const std::scoped_lock lock(mutex());
    blocks().erase(data);
    std::free(data);
  }
  static std::mutex& mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  static std::set<const void*>& blocks() {
    static auto* const blocks = new std::set<const void*>;
    return *blocks;
  }
};

PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  /// Whose memory it is nobody knows: who wraps a pointer has made its device the current one.
  c10::Device getDeviceFromPtr(void*) const override { return device_of(current_device); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchangeDevice(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_of(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = memory.allocate(bytes);
    const std::size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) memory.copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// --- operators

void synchronize_current() { nccl_double_stream_synchronize(current_queue(current_device)); }

/// The same memory as a CPU tensor, which does not keep it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(size, &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(size, strides, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// Within the device, and from pinned memory, on its current stream, which the caller does not wait
/// for.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceGuard guard(to.is_cpu() ? from.device() : to.device());
  if (from.device() == to.device()) {
    enqueue(current_queue(current_device),
            [source = on_host(from), target = on_host(to)] { target.copy_(source); });
  } else if (non_blocking && from.is_cpu() && from.is_pinned()) {
    // As torch's own allocator of pinned memory, it keeps `from` until it has been copied.
    enqueue(current_queue(current_device),
            [source = from.detach(), target = on_host(to)] { target.copy_(source); });
  } else {
    synchronize_current();
    on_host(to).copy_(on_host(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return to.copy_(from);
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  const c10::DeviceGuard guard(self.device());
  enqueue(current_queue(current_device), [=, host = on_host(self)] { host.fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Scalar item(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  synchronize_current();
  return at::cpu::_local_scalar_dense(on_host(self));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

/// The device of an operator's first tensor that is on one, or the current device.
c10::Device device_of(const torch::jit::Stack& arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensorList() && argument.toTensorList().empty()) continue;
    if (!argument.isTensor() && !argument.isTensorList()) continue;
    const at::Tensor tensor =
        argument.isTensor() ? argument.toTensor() : argument.toTensorList().get(0);
    if (tensor.defined() && tensor.is_privateuseone()) return tensor.device();
  }
  return device_of(current_device);
}

/// Everything else runs on the CPU when the current stream, and no other, has come so far.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::DeviceGuard guard(device_of(*stack));
  synchronize_current();
  at::native::cpu_fallback(op, stack);
}

void delay(std::int64_t milliseconds) {
  enqueue(current_queue(current_device),
          [=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}

/// Stops the current stream until the gate is opened, once.
std::int64_t close_gate() {
  auto* const gate = new std::promise<void>;
  enqueue(current_queue(current_device),
          [opened = std::shared_future<void>(gate->get_future())] { opened.wait(); });
  return reinterpret_cast<std::int64_t>(gate);
}

void open_gate(std::int64_t gate) {
  const std::unique_ptr<std::promise<void>> owned(reinterpret_cast<std::promise<void>*>(gate));
  owned->set_value();
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
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("resize_", TORCH_FN(at::native::resize_));
  // The generic ones ask for a kernel of the device's own.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
  // Views do not look at memory: the CPU's will do.
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
  library.def("open_gate(int gate) -> ()", open_gate);
}

[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
