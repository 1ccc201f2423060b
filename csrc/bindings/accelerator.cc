// SPDX-License-Identifier: Apache-2.0
#include "bindings/accelerator.h"

#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/div.h>
#include <ATen/ops/remainder.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <thread>
#include <utility>

#include "bindings/dtypes.h"
#include "bindings/torch_call.h"
#include "core/clock.h"
#include "nccl/loader.h"
#include "nccl/nccl_communicator.h"
#include "nccl/rendezvous.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

constexpr const char* kInstead =
    "Capture the model by torch.cuda.make_graphed_callables(), whose backward is one step of "
    "autograd, and leave gradients, collectives and step() outside of the graph";

/// torch.cuda.is_current_stream_capturing, or that of another device type's module; None without
/// one.
py::object capture_query(const char* type) {
  const py::object module = py::module_::import("torch").attr("get_device_module")(type);
  return py::getattr(module, "is_current_stream_capturing", py::none());
}

template <c10::DeviceType type>
bool is_captured() {
  const py::gil_scoped_acquire gil;
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  const py::object& query =
      storage
          .call_once_and_store_result(
              [] { return capture_query(c10::DeviceTypeName(type, /*lower_case=*/true).c_str()); })
          .get_stored();
  return !query.is_none() && query().template cast<bool>();
}

}  // namespace

std::optional<std::string> capture_problem(c10::Device device, Captured what) {
  const bool captured =
      device.is_cuda() ? is_captured<c10::DeviceType::CUDA>()
                       : device.is_privateuseone() && is_captured<c10::DeviceType::PrivateUse1>();
  if (!captured) return std::nullopt;
  const char* why = what == Captured::kCollective
                        ? "a collective cannot be captured into a CUDA graph: the ranks agree on "
                          "each before they run it, and a replay would agree with nobody. "
                        : "a backward pass of a DistributedOptimizer's parameters cannot be "
                          "captured into a CUDA graph: a replay runs no hooks, so its gradients "
                          "would not be averaged. ";
  return std::string(why) + kInstead;
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void record_on_stream(const at::Tensor& tensor, c10::Stream stream) {
  if (!tensor.has_storage()) return;
  try {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  } catch (const c10::Error&) {  // not memory of this device's allocator: its owner keeps it alive
  }
}

void Producers::add(c10::Stream stream) {
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

void Producers::join(c10::Stream stream) {
  for (const c10::Stream other : streams_) {
    if (other == stream) continue;
    c10::Event made(stream.device_type());
    made.record(other);
    made.block(stream);
  }
  streams_.clear();
}

namespace {
thread_local EnqueuedWork* enqueued_now = nullptr;
}  // namespace

EnqueueingScope::EnqueueingScope(EnqueuedWork& work) { enqueued_now = &work; }
EnqueueingScope::~EnqueueingScope() { enqueued_now = nullptr; }

void keep_for_stream(const at::Tensor& tensor) {
  if (enqueued_now) enqueued_now->kept.push_back(tensor);
}

std::shared_ptr<c10::Event> recorded_now(c10::Device device) {
  struct Pool {
    std::mutex mutex;
    std::vector<std::unique_ptr<c10::Event>> events;
  };
  static auto* const pool = new Pool;  // never destroyed: events outlive everything else
  const auto give_back = [](c10::Event* event) {
    const std::scoped_lock lock(pool->mutex);
    pool->events.emplace_back(event);
  };
  std::unique_ptr<c10::Event> event;
  {
    const std::scoped_lock lock(pool->mutex);
    while (!pool->events.empty() && !event) {
      event = std::move(pool->events.back());
      pool->events.pop_back();
      if (event->device() != device) event.reset();  // of a device that was used before
    }
  }
  if (!event) event = std::make_unique<c10::Event>(device.type());
  event->record(current_stream(device));
  return {event.release(), give_back};
}

OutputEvent::OutputEvent(c10::Device device, std::shared_ptr<c10::Event> ready)
    : events_(std::make_shared<Events>(Events{device, std::move(ready)})),
      home_(current_stream(device)) {}

void OutputEvent::Events::begin() const {
  std::vector<std::shared_ptr<c10::Event>>& awaited = enqueued_now->awaited;
  if (!awaited.empty() && awaited.back() == ready) return;  // of the same group
  torch_call([&] { ready->block(current_stream(device)); });
  awaited.push_back(ready);
}

void OutputEvent::Events::finish() { end = enqueued_now->end; }

void OutputEvent::follow(Request& request) {
  if (request.allocate) home_.reset();
  request.begin = [events = events_, begin = std::move(request.begin)] {
    if (begin) begin();
    events->begin();
  };
  request.finish = [events = events_, finish = std::move(request.finish)] {
    if (finish) finish();
    events->finish();
  };
}

void OutputEvent::wait(const at::Tensor& output, const OutputEvent* waited) const {
  const c10::Stream stream = current_stream(events_->device);
  const WorkEnd* const end = events_->end.get();
  const WorkEnd* const before = waited ? waited->events_->end.get() : nullptr;
  const bool waits =
      before && end && before->stream == end->stream && before->number >= end->number;
  if (end && !waits) end->event->block(stream);
  if (home_ != stream) record_on_stream(output, stream);
}

namespace {

/// `count` elements of the device's memory as a tensor that owns nothing.
at::Tensor view_of(void* data, std::size_t count, DType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(scalar_type_of(dtype)).device(device);
  return at::from_blob(data, {static_cast<std::int64_t>(count)}, [](void*) {}, options, device);
}

/// cuThreadExchangeStreamCaptureMode, or its sibling on AMD's GPUs; null without either. CUDA's
/// driver is loaded by the runtime, AMD's runtime with torch.
auto* capture_mode_exchange() {
  using Exchange = int(int* mode);
  static auto* const function = [] {
    void* const cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = cuda ? dlsym(cuda, "cuThreadExchangeStreamCaptureMode") : nullptr;
    if (!symbol) symbol = dlsym(RTLD_DEFAULT, "hipThreadExchangeStreamCaptureMode");
    return reinterpret_cast<Exchange*>(symbol);
  }();
  return function;
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
    if (auto* const function = capture_mode_exchange()) function(&mode_);
  }

  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, or HIP's; then the previous mode
};

/// While this lives, a device and its stream are this thread's current ones.
struct StreamScope {
  explicit StreamScope(c10::Stream stream) : guard(stream) {}
  RelaxedCaptureScope relaxed;
  c10::StreamGuard guard;
};

// How long a device may take to run its work after an abort.
constexpr std::chrono::milliseconds kLastWork{5000};

/// Errors of torch leave as Error, without C++ frames: other ranks read them.
class Accelerator final : public Device, public Buffers {
 public:
  Accelerator(c10::Stream stream, Communicator& host, const Abort& abort, DevicePatience patience,
              const nccl::Rendezvous& rendezvous)
      : stream_(stream), patience_(std::move(patience)), api_(rendezvous.api) {
    torch_call([&] {
      const StreamScope now(stream_);
      communicator_.emplace(api_, rendezvous.id, host.rank(), host.size(), abort,
                            patience_.config.transfer_timeout(), arithmetic());
    });
  }

  ~Accelerator() override {
    const bool released = communicator_->close();
    // Arithmetic may stand behind aborted collectives.
    const auto patience = std::min(patience_.config.transfer_timeout(), kLastWork);
    if (released && (batches_.empty() || has_drained(patience))) return;
    // NCCL hangs, or the device does: the memory that they may still write to is leaked.
    new std::deque<EnqueuedWork>(std::move(batches_));
    new at::Tensor(std::move(buffer_));
  }

  Communicator& communicator() override { return *communicator_; }
  Buffers& buffers() override { return *this; }

  void use(const std::function<void()>& enqueue) override {
    torch_call([&] {
      const StreamScope now(stream_);
      if (batches_.empty()) begin_next(Clock::now());
      EnqueuedWork& batch = batches_.emplace_back();
      batch.end = std::make_shared<WorkEnd>(WorkEnd{stream_, ++enqueued_});
      const EnqueueingScope enqueueing(batch);
      enqueue();  // after an error the stream is given up; the batch stays
      batch.end->event = recorded_now(stream_.device());
    });
  }

  bool busy() override {
    if (batches_.empty()) return false;
    torch_call([&] {
      const StreamScope now(stream_);
      communicator_->check();
      while (!batches_.empty() && has_ended(batches_.front())) {
        batches_.pop_front();
        begin_next(Clock::now());
      }
      if (!batches_.empty()) check_stall(Clock::now());
    });
    return !batches_.empty();
  }

  void abort() noexcept override { communicator_->abort(); }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    at::Tensor tensor = torch_call([&] {
      const StreamScope now(stream_);
      return empty(bytes);
    });
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
    alignas(16) std::array<std::byte, 16> one{};
    torch_ring::fill_identity(one.data(), 1, dtype, op);
    torch_call([&] {
      const StreamScope now(stream_);
      const at::Tensor value = view_of(one.data(), 1, dtype, at::kCPU);
      view_of(data, count, dtype, stream_.device()).fill_(value.item());
    });
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
      std::optional<StreamScope> now;
      try {
        now.emplace(stream);
      } catch (const c10::Error&) {  // the device has failed: NCCL ends without it
      }
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

  static bool has_ended(const EnqueuedWork& batch) {
    return batch.end->event && batch.end->event->query();
  }

  /// The device goes on to the next batch.
  void begin_next(Clock::time_point now) {
    since_ = now;
    reached_.reset();
  }

  /// A batch is late from the time on when the device has run the program's own work before it:
  /// only then does the batch wait for other ranks.
  void check_stall(Clock::time_point now) {
    const auto ready = [](const auto& event) { return event->query(); };
    const auto& awaited = batches_.front().awaited;
    if (!reached_ && std::all_of(awaited.begin(), awaited.end(), ready)) reached_ = now;
    const auto timeout = patience_.config.timeout;
    const auto warning = patience_.config.stall_warning;
    const std::string collective = "a collective on " + stream_.device().str();
    if (timeout.count() > 0 && reached_ && now - *reached_ > timeout) {
      throw Error(ErrorKind::kTimeout, collective + " has not ended within " + in_seconds(timeout) +
                                           ": another rank's device does not get to it");
    }
    if (warning.count() > 0 && now - std::max(since_, warned_) > warning) {
      warned_ = now;
      const auto waited = std::chrono::floor<std::chrono::seconds>(now - since_);
      patience_.log("rank " + std::to_string(communicator_->rank()) + ": " + collective +
                    " has not ended for " + in_seconds(waited) +
                    (reached_ ? ": another rank's device does not get to it"
                              : ": this rank's device has not got to it yet, for it still runs "
                                "work of the program that comes before"));
    }
  }

  /// Whether the stream has run all its work; waits for that for `patience` at most. No: the device
  /// hangs, or has failed.
  bool has_drained(std::chrono::milliseconds patience) const noexcept {
    try {
      const StreamScope now(stream_);
      const auto deadline = Clock::now() + patience;
      while (!stream_.query()) {
        if (Clock::now() >= deadline) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  at::Tensor empty(std::size_t bytes) const {
    return at::empty({static_cast<std::int64_t>(bytes)},
                     at::TensorOptions().dtype(at::kByte).device(stream_.device()));
  }

  const c10::Stream stream_;
  const DevicePatience patience_;
  const nccl::Api api_;
  std::uint64_t enqueued_ = 0;        // batches: one for each use()
  std::deque<EnqueuedWork> batches_;  // pending ones, in the order of the stream
  // Of the first batch: when it became the first, and when the device was seen to have reached it.
  Clock::time_point since_;
  std::optional<Clock::time_point> reached_;
  Clock::time_point warned_;  // when a stall was logged last
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
                    "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())");
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

namespace {

/// torch_ring.setup.gpu.place_of().
nccl::GpuPlace gpu_of(c10::Device device) {
  const py::gil_scoped_acquire gil;
  try {
    const auto place = py::module_::import("torch_ring.setup.gpu")
                           .attr("place_of")(c10::DeviceTypeName(device.type(), true),
                                             static_cast<int>(device.index()))
                           .cast<std::pair<std::string, std::string>>();
    return {place.first, place.second};
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch_ring's look at the GPU");
    return {};
  }
}

}  // namespace

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
    if (settings.in_clear) {
      throw Error(ErrorKind::kInvalidArgument,
                  "TORCH_RING_TLS=1, and NCCL sends tensors between hosts in the clear: move them "
                  "to the CPU, or accept that with TORCH_RING_TLS=cpu (docs/security.md)");
    }
    try {
      const c10::Device device = choice.get(type);
      stream = c10::impl::VirtualGuardImpl(type).getStreamFromGlobalPool(device, true);
    } catch (const c10::Error& error) {
      throw Error(ErrorKind::kInvalidArgument, error.what_without_backtrace());
    }
    return nccl::Loaded(nccl::load(settings.library), gpu_of(stream->device()));
  };
  const nccl::Rendezvous rendezvous = nccl::rendezvous(host, labels, load);
  auto device = std::make_unique<Accelerator>(*stream, host, abort, patience, rendezvous);
  try {
    host.barrier();  // no rank's first collective meets a rank that still connects
  } catch (const Error&) {
    device->abort();
    throw;
  }
  return device;
}

namespace {

/// float64 values as integers: truncated toward zero, clamped to the range of `type`.
at::Tensor truncated(const at::Tensor& values, at::ScalarType type) {
  if (type != at::kLong) {
    const auto range = at::kInt == type     ? std::pair{-0x1p31, 0x1p31 - 1}
                       : at::kShort == type ? std::pair{-0x1p15, 0x1p15 - 1}
                       : at::kChar == type  ? std::pair{-0x1p7, 0x1p7 - 1}
                                            : std::pair{0.0, 0x1p8 - 1};
    return values.clamp(range.first, range.second).to(type);
  }
  using Limits = std::numeric_limits<std::int64_t>;
  const at::Tensor inside = values.clamp(-0x1p63, 0x1.fffffffffffffp62).to(type);
  return inside.masked_fill_(values.ge(0x1p63), Limits::max());
}

/// Integers that may have wrapped around, by their float64 values: these where the integers are out
/// of range. An integer between 2^63 and 1.5 * 2^63 wraps around to one of the other sign.
at::Tensor clamped(const at::Tensor& integers, const at::Tensor& values) {
  const at::Tensor wraps = values.abs().gt(0x1.8p63).logical_or_(integers.lt(0).ne(values.lt(0)));
  return at::where(wraps, truncated(values, integers.scalar_type()), integers);
}

bool is_float(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

}  // namespace

void scale(const at::Tensor& output, const at::Tensor& input, const Scaling& scaling) {
  if (input.scalar_type() == at::kBool) {
    output.copy_(input);
    return;
  }
  const double factor = scaling.prescale * scaling.postscale / static_cast<double>(scaling.divisor);
  if (is_float(input)) {
    at::Tensor target = output;
    at::mul_out(target, input, at::native::wrapped_scalar_tensor(factor));
  } else {
    const at::Tensor values = input.to(at::kDouble) * factor;
    const bool is_exact = input.scalar_type() == at::kLong && is_whole(factor);
    output.copy_(is_exact ? clamped(input * at::Scalar(static_cast<std::int64_t>(factor)), values)
                          : truncated(values, input.scalar_type()));
  }
}

at::Tensor widened(const at::Tensor& tensor, const Reduction& reduction) {
  if (tensor.scalar_type() == at::kInt) return tensor.to(at::kLong);
  if (tensor.scalar_type() != at::kLong) return tensor.to(at::kInt);
  const std::int64_t ranks = reduction.scaling.divisor;
  const at::Tensor quotient = at::div(tensor, at::Scalar(ranks), "trunc");
  return at::stack({quotient, tensor - quotient * at::Scalar(ranks)}, 1);
}

void narrow(const at::Tensor& output, const at::Tensor& wide, const Reduction& reduction) {
  const Scaling& scaling = reduction.scaling;
  if (!averages_integers(reduction)) {
    output.copy_(wide);  // wraps around, as a sum in the dtype itself
    if (scaling.postscale != 1.0) scale(output, output, {.postscale = scaling.postscale});
    return;
  }
  const at::Scalar ranks(scaling.divisor);
  const bool is_pair = output.scalar_type() == at::kLong;
  const auto in_float64 = [&] {
    const at::Tensor values = wide.to(at::kDouble);
    const at::Tensor sum = is_pair ? values.select(1, 0) * ranks + values.select(1, 1) : values;
    return sum * scaling.postscale / static_cast<double>(scaling.divisor);
  };
  if (is_pair && is_whole(scaling.postscale) && std::abs(scaling.postscale) < 0x1p31) {
    // The average rounded down, from the quotients and the remainders; then toward zero.
    const at::Scalar factor(static_cast<std::int64_t>(scaling.postscale));
    const at::Tensor rest = wide.select(1, 1) * factor;
    const at::Tensor down = wide.select(1, 0) * factor + at::div(rest, ranks, "floor");
    const at::Tensor is_inexact = at::remainder(rest, ranks).ne(0);
    const at::Tensor average = down + down.lt(0).logical_and_(is_inexact).to(at::kLong);
    output.copy_(scaling.postscale == 1.0 ? average : clamped(average, in_float64()));
  } else if (scaling.postscale != 1.0) {
    output.copy_(truncated(in_float64(), output.scalar_type()));
  } else {
    output.copy_(at::div(wide, ranks, "trunc"));
  }
}

}  // namespace torch_ring
