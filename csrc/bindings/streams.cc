#include "bindings/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace torch_ring {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

namespace {
thread_local std::vector<at::Tensor>* kept_now = nullptr;
}  // namespace

Keeping::Keeping(std::vector<at::Tensor>& kept) { kept_now = &kept; }
Keeping::~Keeping() { kept_now = nullptr; }

void keep_for_stream(const at::Tensor& tensor) {
  if (kept_now) kept_now->push_back(tensor);
}

void share_with_current_stream(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  device.recordDataPtrOnStream(tensor.storage().data_ptr(), device.getStream(tensor.device()));
}

Written::Written(c10::Device device)
    : device_(device), event_(std::make_shared<c10::Event>(device.type())) {}

void Written::follow(Request& request) {
  const auto ready = std::make_shared<c10::Event>(device_.type());
  ready->record(current_stream(device_));
  request.begin = [ready, device = device_, begin = std::move(request.begin)] {
    if (begin) begin();
    ready->block(current_stream(device));
  };
  request.finish = [event = event_, device = device_, finish = std::move(request.finish)] {
    if (finish) finish();
    event->record(current_stream(device));
  };
}

void Written::wait() const { event_->block(current_stream(device_)); }

}  // namespace torch_ring
