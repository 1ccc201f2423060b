#include "bindings/accelerator.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include "bindings/dtypes.h"
#include "bindings/graph_capture.h"
#include "bindings/scaling.h"
#include "bindings/streams.h"
#include "core/clock.h"
#include "nccl/loader.h"
#include "nccl/nccl_communicator.h"
#include "nccl/rendezvous.h"

namespace torch_ring {

namespace {

/// `count` elements of the device's memory as a tensor that owns nothing.
at::Tensor view_of(void* data, std::size_t count, DType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(scalar_type_of(dtype)).device(device);
  return at::from_blob(data, {static_cast<std::int64_t>(count)}, [](void*) {}, options, device);
}

/// While this lives, this thread may make the calls that another thread's capture into a CUDA graph
/// forbids: the engine's thread polls collectives while the user's thread captures.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope() { exchange(); }
  ~RelaxedCaptureScope() { exchange(); }
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  void exchange() {
    using Exchange = int(int* mode);  // cuThreadExchangeStreamCaptureMode
    static auto* const function = [] {
      void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
      void* symbol = cuda ? dlsym(cuda, "cuThreadExchangeStreamCaptureMode") : nullptr;
      return reinterpret_cast<Exchange*>(symbol);
    }();
    if (function) function(&mode_);
  }

  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; then the previous mode
};

/// While this lives, a device and its stream are this thread's current ones.
struct StreamScope {
  explicit StreamScope(c10::Stream stream) : guard(stream) {}
  RelaxedCaptureScope relaxed;
  c10::StreamGuard guard;
};

class Accelerator final : public Device, public Buffers {
 public:
  Accelerator(c10::Stream stream, Communicator& host, const Abort& abort, DevicePatience patience,
              const nccl::Rendezvous& rendezvous)
      : stream_(stream), patience_(std::move(patience)), api_(rendezvous.api) {
    const StreamScope now(stream_);
    communicator_.emplace(api_, rendezvous.id, host.rank(), host.size(), abort,
                          patience_.config.transfer_timeout(), arithmetic());
  }

  ~Accelerator() override {
    const StreamScope now(stream_);
    if (communicator_->close()) return;
    // NCCL hangs, and may yet write: what it uses is left behind with it.
    new std::deque<Batch>(std::move(batches_));
    new at::Tensor(std::move(buffer_));
  }

  Communicator& communicator() override { return *communicator_; }
  Buffers& buffers() override { return *this; }

  void use(const std::function<void()>& enqueue) override {
    const StreamScope now(stream_);
    if (batches_.empty()) progress_ = Clock::now();
    Batch& batch = batches_.emplace_back(stream_.device_type());
    const KeepAliveScope keeping(batch.kept);
    enqueue();  // after an error the stream is given up; the batch stays
    batch.done.record(stream_);
  }

  bool busy() override {
    if (batches_.empty()) return false;
    const StreamScope now(stream_);
    communicator_->check();
    while (!batches_.empty() && batches_.front().done.query()) {
      batches_.pop_front();
      progress_ = Clock::now();
    }
    if (!batches_.empty()) check_stall(Clock::now());
    return !batches_.empty();
  }

  void abort() noexcept override {
    const StreamScope now(stream_);
    communicator_->abort();
  }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    const StreamScope now(stream_);
    at::Tensor tensor = empty(bytes);
    void* data = tensor.mutable_data_ptr();
    return {data, [tensor = std::move(tensor)](void*) {}};
  }

  void* fusion_buffer(std::size_t bytes) override {
    const StreamScope now(stream_);
    if (!buffer_.defined() || buffer_.nbytes() < bytes) buffer_ = empty(bytes);
    return buffer_.mutable_data_ptr();
  }

  void copy(std::span<const Copy> copies, DType dtype) override {
    const StreamScope now(stream_);
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    for (const Copy& copy : copies) {
      if (copy.count == 0) continue;
      to.push_back(view_of(copy.to, copy.count, dtype, stream_.device()));
      from.push_back(view_of(const_cast<void*>(copy.from), copy.count, dtype, stream_.device()));
    }
    if (!to.empty()) at::_foreach_copy_(to, from);
  }

  void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) override {
    const StreamScope now(stream_);
    alignas(16) std::array<std::byte, 16> one{};
    torch_ring::fill_identity(one.data(), 1, dtype, op);
    const at::Tensor value = view_of(one.data(), 1, dtype, at::kCPU);
    view_of(data, count, dtype, stream_.device()).fill_(value.item());
  }

 private:
  /// The stream of the communicator, and arithmetic on it.
  nccl::Device arithmetic() const {
    const auto view = [device = stream_.device()](const void* data, std::size_t count,
                                                  DType dtype) {
      return view_of(const_cast<void*>(data), count, dtype, device);
    };
    nccl::Device device{static_cast<nccl::Stream>(stream_.native_handle())};
    device.use = [stream = stream_](const std::function<void()>& call) {
      const StreamScope now(stream);
      call();
    };
    device.log = patience_.log;
    device.scale = [view](void* output, const void* input, std::size_t count, DType dtype,
                          const Scaling& scaling) {
      scale(view(output, count, dtype), view(input, count, dtype), scaling);
    };
    device.allocate = [this](std::size_t bytes) {
      const at::Tensor memory = empty(bytes);
      keep_for_stream(memory);
      return memory.mutable_data_ptr();
    };
    device.widen = [view](const void* data, std::size_t count, const Reduction& reduction) {
      const at::Tensor wide = widened(view(data, count, reduction.dtype), reduction);
      keep_for_stream(wide);
      return nccl::Widened{wide.mutable_data_ptr(), wide.dim() == 2 ? std::size_t{2} : 1,
                           wide.scalar_type() == at::kInt ? DType::kInt32 : DType::kInt64};
    };
    device.narrow = [view](void* output, const nccl::Widened& data, std::size_t count,
                           const Reduction& reduction) {
      at::Tensor wide = view(data.data, count * data.item, data.dtype);
      if (data.item > 1) wide = wide.view({-1, static_cast<std::int64_t>(data.item)});
      narrow(view(output, count, reduction.dtype), wide, reduction);
    };
    return device;
  }

  /// The work that one use() enqueued: its end, and the tensors that it uses.
  struct Batch {
    explicit Batch(c10::DeviceType type) : done(type) {}
    c10::Event done;
    std::vector<at::Tensor> kept;
  };

  void check_stall(Clock::time_point now) {
    const auto timeout = patience_.config.timeout;
    const auto warning = patience_.config.stall_warning;
    const std::string collective = "a collective on " + stream_.device().str();
    if (timeout.count() > 0 && now - progress_ > timeout) {
      throw Error(ErrorKind::kTimeout, collective + " has not ended within " + in_seconds(timeout) +
                                           ": another rank's device does not get to it");
    }
    if (warning.count() > 0 && now - std::max(progress_, warned_) > warning) {
      warned_ = now;
      const auto waited = std::chrono::floor<std::chrono::seconds>(now - progress_);
      patience_.log("rank " + std::to_string(communicator_->rank()) + ": " + collective +
                    " has not ended for " + in_seconds(waited) +
                    ": another rank's device, or this one's, does not get to it");
    }
  }

  at::Tensor empty(std::size_t bytes) const {
    return at::empty({static_cast<std::int64_t>(bytes)},
                     at::TensorOptions().dtype(at::kByte).device(stream_.device()));
  }

  const c10::Stream stream_;
  const DevicePatience patience_;
  const nccl::Api api_;
  std::deque<Batch> batches_;   // those that have not ended, in the order of the stream
  Clock::time_point progress_;  // when the last one ended, or the first began
  Clock::time_point warned_;    // when a stall was logged last
  std::optional<nccl::NcclCommunicator> communicator_;
  at::Tensor buffer_;
};

}  // namespace

std::shared_ptr<DeviceChoice> DeviceChoice::of_process() {
  static std::mutex mutex;
  static std::weak_ptr<DeviceChoice> shared;
  const std::scoped_lock lock(mutex);
  std::shared_ptr<DeviceChoice> choice = shared.lock();
  if (!choice) shared = choice = std::make_shared<DeviceChoice>();
  return choice;
}

void DeviceChoice::use(c10::Device device) {
  if (device.is_cpu()) return;
  if (const auto problem = capture_problem(device, Captured::kCollective)) {
    throw Error(ErrorKind::kInvalidArgument, *problem);
  }
  const std::scoped_lock lock(mutex_);
  if (!device_) device_ = device;
  if (*device_ != device) {
    throw Error(ErrorKind::kInvalidArgument,
                "this process uses " + device_->str() + ", and the tensor is on " + device.str() +
                    ": one process drives one device, from its first collective on. Start a "
                    "process for each device, and choose it before: "
                    "torch.cuda.set_device(local_rank())");
  }
}

std::optional<c10::Device> DeviceChoice::chosen() {
  const std::scoped_lock lock(mutex_);
  return device_;
}

void DeviceChoice::prefer_current() {
  const std::scoped_lock lock(mutex_);
  for (const auto type : {c10::DeviceType::CUDA, c10::DeviceType::PrivateUse1}) {
    if (device_ || !c10::impl::hasDeviceGuardImpl(type)) continue;
    const c10::impl::VirtualGuardImpl devices(type);
    if (devices.deviceCount() > 0) preferred_ = devices.getDevice();
    if (preferred_) return;
  }
}

c10::Device DeviceChoice::get(c10::DeviceType type) {
  const std::scoped_lock lock(mutex_);
  if (!device_) {
    device_ = preferred_ && preferred_->type() == type
                  ? *preferred_
                  : c10::impl::VirtualGuardImpl(type).getDevice();
  }
  return *device_;
}

std::unique_ptr<Device> make_accelerator(DeviceChoice& choice, c10::DeviceType type,
                                         Communicator& host, const Abort& abort,
                                         const DevicePatience& patience,
                                         const std::vector<std::string>& labels,
                                         const NcclSettings& settings) {
  std::optional<c10::Stream> stream;
  const auto load = [&] {
    if (settings.blocking) {
      throw Error(ErrorKind::kInvalidArgument,
                  "NCCL_COMM_BLOCKING is set: NCCL would wait without a deadline; unset it");
    }
    try {
      const c10::Device device = choice.get(type);
      stream = c10::impl::VirtualGuardImpl(type).getStreamFromGlobalPool(device, true);
    } catch (const c10::Error& error) {
      throw Error(ErrorKind::kInvalidArgument, error.what_without_backtrace());
    }
    return nccl::load(settings.library);
  };
  const nccl::Rendezvous rendezvous = nccl::rendezvous(host, labels, load);
  return std::make_unique<Accelerator>(*stream, host, abort, patience, rendezvous);
}

}  // namespace torch_ring
