// SPDX-License-Identifier: Apache-2.0
// The device double's devices, streams and memory.
#include "device_double.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "counts.h"
#include "doubles/nccl_double.h"

namespace device_double {
namespace {

using Queue = torch_ring::nccl::Stream;

constexpr c10::DeviceIndex kDevices = 2;
constexpr int kPoison = 0xCD;
constexpr std::size_t kStreamsOfPool = 32;

std::atomic<bool> failed{false};  // a kernel has failed: from then on every call does

void check() { TORCH_CHECK(!failed, "the double's error: device-side assert triggered"); }

/// `own`: the double's own business, for which no launch waits.
void enqueue(Queue queue, std::function<void()> task, bool own = false) {
  (own ? nccl_double_stream_append : nccl_double_stream_enqueue)(
      queue,
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> owned(
            static_cast<std::function<void()>*>(argument));
        (*owned)();
      },
      new std::function<void()>(std::move(task)));
}

// --- devices and streams

thread_local c10::DeviceIndex current_index = 0;
thread_local std::array<c10::StreamId, kDevices> current_stream{};

c10::Device device_of(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }

/// The streams of one device: the default one, and two pools, of usual and of high priority. Each
/// pool gives out its streams in turns, as torch's do. They live as long as the process.
class Streams {
 public:
  explicit Streams(int gpu) : gpu_(gpu) {}

  c10::StreamId next(bool high_priority) {
    const std::scoped_lock lock(mutex_);
    const std::size_t turn = given_.at(high_priority)++ % kStreamsOfPool;
    return static_cast<c10::StreamId>(1 + high_priority * kStreamsOfPool + turn);
  }

  Queue at(c10::StreamId id) {
    const std::scoped_lock lock(mutex_);
    Queue& queue = queues_.at(static_cast<std::size_t>(id));
    if (!queue) queue = nccl_double_stream_create(gpu_);
    return queue;
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    const auto queues = queues_;
    lock.unlock();
    for (Queue queue : queues) {
      if (queue) nccl_double_stream_synchronize(queue);
    }
  }

  static Streams& of(c10::DeviceIndex device) {
    static auto* const streams = new std::array<Streams, kDevices>{Streams(0), Streams(1)};
    return streams->at(static_cast<std::size_t>(device));
  }

 private:
  const int gpu_;
  std::mutex mutex_;
  std::array<Queue, 1 + 2 * kStreamsOfPool> queues_{};
  std::array<std::size_t, 2> given_{};
};

Queue queue_of(const c10::Stream& stream) {
  return Streams::of(stream.device_index()).at(stream.id());
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_index;
}

Queue current_queue(c10::DeviceIndex device) {
  return Streams::of(device).at(current_stream.at(static_cast<std::size_t>(device)));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override {
    check();
    return device_of(current_index);
  }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_index = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    check();
    TORCH_CHECK(device.index() < kDevices, "the double has ", int{kDevices}, " devices");
    return device_of(std::exchange(current_index, index_of(device)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count(counts.host_waits);
    Streams::of(device).synchronize();
    check();
  }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, device_of(index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream.at(static_cast<std::size_t>(index_of(device))));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    check();
    return stream(device, Streams::of(index_of(device)).next(high_priority));
  }
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = getStream(stream.device());
    current_stream.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    check();
    return nccl_double_stream_query(queue_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count(counts.host_waits);
    nccl_double_stream_synchronize(queue_of(stream));
    check();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    count(counts.recorded);
    check();
    if (!*event) *event = nccl_double_event_create();
    nccl_double_event_record(*event, queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    count(counts.awaited);
    check();
    nccl_double_event_wait(event, queue_of(stream));
  }
  bool queryEvent(void* event) const override {
    check();
    return !event || nccl_double_event_query(event);
  }
  void synchronizeEvent(void* event) const override {
    check();
    if (!event) return;
    count(counts.host_waits);
    nccl_double_event_synchronize(event);
    check();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) nccl_double_event_destroy(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- memory

/// Memory that was allocated on one stream, its owner.
struct Block {
  std::byte* data;
  std::size_t bytes;
  Queue owner;
  std::mutex mutex;
  std::set<Queue> users;  // other streams
};

/// The memory of one device, given out as torch's caching allocator does: freed memory is the next
/// of its size on its owner, at once. If other streams have used it, they must have passed its
/// release before. It is poisoned in the owner's order, so late readers see the poison. At the
/// limit, an allocation waits for the device, and gives back all that is free.
class Cache {
 public:
  std::byte* take(Queue owner, std::size_t bytes, c10::DeviceIndex device) {
    std::unique_lock lock(mutex_);
    collect();
    std::vector<std::byte*>& same = free_[{owner, bytes}];
    if (!same.empty()) {
      std::byte* const data = same.back();
      same.pop_back();
      return data;
    }
    if (held_ + bytes > limit_) {
      lock.unlock();
      count(counts.host_waits);
      Streams::of(device).synchronize();
      lock.lock();
      collect();
      drop();
    }
    TORCH_CHECK(held_ + bytes <= limit_, "the double is out of memory");
    auto* const data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes));
    TORCH_CHECK(data, "the double is out of memory");
    held_ += bytes;
    std::memset(data, kPoison, bytes);
    return data;
  }

  void give(const Block& block) {
    Used used{block.data, block.bytes, block.owner, {}};
    for (Queue user : block.users) {
      used.passed.push_back(nccl_double_event_create());
      nccl_double_event_record(used.passed.back(), user);
    }
    const std::scoped_lock lock(mutex_);
    used_.push_back(std::move(used));
    collect();
  }

  static Cache& of(c10::DeviceIndex device) {
    static auto* const caches = new std::array<Cache, kDevices>;
    return caches->at(static_cast<std::size_t>(device));
  }

  static constexpr std::size_t kAlignment = 512;

 private:
  struct Used {
    std::byte* data;
    std::size_t bytes;
    Queue owner;
    std::vector<void*> passed;  // events of other streams
  };

  /// Frees the memory that all other streams have passed.
  void collect() {
    std::erase_if(used_, [&](const Used& used) {
      if (!std::ranges::all_of(used.passed, nccl_double_event_query)) return false;
      std::ranges::for_each(used.passed, nccl_double_event_destroy);
      const auto poison = [data = used.data, bytes = used.bytes] {
        std::memset(data, kPoison, bytes);
      };
      enqueue(used.owner, poison, true);
      free_[{used.owner, used.bytes}].push_back(used.data);
      return true;
    });
  }

  /// Precondition: the device has run all work.
  void drop() {
    for (auto& [key, blocks] : free_) {
      nccl_double_stream_synchronize(key.first);  // the poison
      for (std::byte* data : blocks) std::free(data);
      held_ -= key.second * blocks.size();
    }
    free_.clear();
  }

  std::mutex mutex_;
  std::map<std::pair<Queue, std::size_t>, std::vector<std::byte*>> free_;
  std::vector<Used> used_;
  std::size_t held_ = 0;  // bytes, also free ones
  const std::size_t limit_ = std::size_t{2} << 30;
};

void release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  Cache::of(static_cast<c10::DeviceIndex>(nccl_double_stream_gpu(block->owner))).give(*block);
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  check();
  if (auto* const block = data.cast_context<Block>(&release)) {
    const std::scoped_lock lock(block->mutex);
    if (queue_of(stream) != block->owner) block->users.insert(queue_of(stream));
  }
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    check();
    const c10::Device device = device_of(current_index);
    if (bytes == 0) return {nullptr, device};
    bytes = (bytes + Cache::kAlignment - 1) / Cache::kAlignment * Cache::kAlignment;
    Queue const owner = current_queue(current_index);
    std::byte* const data = Cache::of(current_index).take(owner, bytes, current_index);
    return {data, new Block{data, bytes, owner, {}, {}}, &release, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    count(counts.copies);
    check();
    enqueue(current_queue(current_index), [=] { std::memcpy(to, from, bytes); });
  }
};

Memory memory;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &memory)

/// Pinned host memory, from which the device copies while the host runs on.
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
  /// The current device: a pointer does not tell its device, but its caller has made that current.
  c10::Device getDeviceFromPtr(void*) const override { return device_of(current_index); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchangeDevice(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_of(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_index : exchangeDevice(device);
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

[[maybe_unused]] const bool hooked = [] {
  nccl_double_tell_gpu([]() -> int { return failed ? -1 : current_index; });
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::Device current_device() { return device_of(current_index); }

void enqueue(std::function<void()> task) {
  check();
  enqueue(current_queue(current_index), std::move(task));
}

void synchronize() {
  nccl_double_stream_synchronize(current_queue(current_index));
  check();
}

void fail(bool fails) { failed = fails; }

c10::Allocator& device_memory() { return memory; }

}  // namespace device_double
