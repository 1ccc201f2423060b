#include "bindings/accelerator.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <array>
#include <utility>

#include "bindings/scaling.h"
#include "bindings/streams.h"
#include "nccl/loader.h"
#include "nccl/meeting.h"
#include "nccl/nccl_communicator.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return at::kByte;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kBool:
      return at::kBool;
  }
  return at::kByte;
}

/// `count` elements of the device's memory as a tensor that owns nothing.
at::Tensor view_of(void* data, std::size_t count, DType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(scalar_type_of(dtype)).device(device);
  return at::from_blob(data, {static_cast<std::int64_t>(count)}, [](void*) {}, options, device);
}

class Accelerator final : public Device, public Memory {
 public:
  Accelerator(c10::Device device, Communicator& host, const Abort& abort,
              std::chrono::milliseconds timeout, const nccl::Meeting& meeting)
      : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true)),
        last_(device.type()),
        api_(meeting.api) {
    const c10::StreamGuard guard(stream_);
    const auto scale = [device](void* data, std::size_t count, DType dtype,
                                const Scaling& scaling) {
      scale_result(view_of(data, count, dtype, device), scaling);
    };
    communicator_.emplace(api_, meeting.id, host.rank(), host.size(), host.board(), abort, timeout,
                          nccl::Device{static_cast<nccl::Stream>(stream_.native_handle()), scale});
  }

  ~Accelerator() override {
    const c10::StreamGuard guard(stream_);
    communicator_.reset();
  }

  Communicator& communicator() override { return *communicator_; }
  Memory& memory() override { return *this; }

  void use(const std::function<void()>& enqueue) override {
    const c10::StreamGuard guard(stream_);
    enqueue();
    last_.record(stream_);
    busy_ = true;
  }

  bool busy() override {
    if (!busy_) return false;
    const c10::StreamGuard guard(stream_);
    communicator_->check();
    busy_ = !last_.query();
    return busy_;
  }

  void abort() noexcept override {
    const c10::StreamGuard guard(stream_);
    communicator_->abort();
  }

  std::shared_ptr<void> allocate(std::size_t bytes) override {
    const c10::StreamGuard guard(stream_);
    at::Tensor tensor = empty(bytes);
    void* data = tensor.mutable_data_ptr();
    return {data, [tensor = std::move(tensor)](void*) {}};
  }

  void* buffer(std::size_t bytes) override {
    const c10::StreamGuard guard(stream_);
    if (!buffer_.defined() || buffer_.nbytes() < bytes) buffer_ = empty(bytes);
    return buffer_.mutable_data_ptr();
  }

  void copy(std::span<const Copy> copies, DType dtype) override {
    const c10::StreamGuard guard(stream_);
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
    const c10::StreamGuard guard(stream_);
    std::array<std::byte, 8> one{};
    torch_ring::fill_identity(one.data(), 1, dtype, op);
    const at::Tensor value = view_of(one.data(), 1, dtype, at::kCPU);
    view_of(data, count, dtype, stream_.device()).fill_(value.item());
  }

 private:
  at::Tensor empty(std::size_t bytes) const {
    return at::empty({static_cast<std::int64_t>(bytes)},
                     at::TensorOptions().dtype(at::kByte).device(stream_.device()));
  }

  const c10::Stream stream_;
  c10::Event last_;  // after what was enqueued last
  bool busy_ = false;
  const nccl::Api api_;
  std::optional<nccl::NcclCommunicator> communicator_;
  at::Tensor buffer_;
};

/// A graph that is replayed does not agree with other ranks on what comes next.
bool is_captured(c10::Device device) {
  if (!device.is_cuda()) return false;
  const py::gil_scoped_acquire gil;
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  return storage
      .call_once_and_store_result(
          [] { return py::module_::import("torch.cuda").attr("is_current_stream_capturing"); })
      .get_stored()()
      .cast<bool>();
}

}  // namespace

void DeviceChoice::use(c10::Device device) {
  if (is_captured(device)) {
    throw Error(ErrorKind::kInvalidArgument,
                "a collective cannot be captured into a CUDA graph: the ranks agree on each before "
                "they run it. Capture forward and backward only within optimizer.no_sync(), or "
                "leave the collectives outside of the graph");
  }
  const std::scoped_lock lock(mutex_);
  if (!device_) device_ = device;
  if (*device_ != device) {
    throw Error(ErrorKind::kInvalidArgument,
                "this process uses " + device_->str() + ", and the tensor is on " + device.str() +
                    ": one process drives one device; call torch.cuda.set_device(local_rank())");
  }
}

c10::Device DeviceChoice::get(c10::DeviceType type) const {
  const std::scoped_lock lock(mutex_);
  if (device_ && device_->type() == type) return *device_;
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

std::unique_ptr<Device> make_accelerator(c10::Device device, Communicator& host, const Abort& abort,
                                         std::chrono::milliseconds timeout,
                                         const std::vector<std::string>& labels,
                                         const std::string& library) {
  const nccl::Meeting meeting = nccl::meet(host, labels, [&] { return nccl::load(library); });
  return std::make_unique<Accelerator>(device, host, abort, timeout, meeting);
}

}  // namespace torch_ring
