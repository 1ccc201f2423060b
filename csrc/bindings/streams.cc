#include "bindings/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace torch_ring {

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
thread_local std::vector<at::Tensor>* kept_now = nullptr;
}  // namespace

KeepAliveScope::KeepAliveScope(std::vector<at::Tensor>& kept) { kept_now = &kept; }
KeepAliveScope::~KeepAliveScope() { kept_now = nullptr; }

void keep_for_stream(const at::Tensor& tensor) {
  if (kept_now) kept_now->push_back(tensor);
}

OutputEvent::OutputEvent(c10::Device device)
    : device_(device), event_(std::make_shared<c10::Event>(device.type())) {}

void OutputEvent::follow(Request& request) {
  const auto ready = std::make_shared<c10::Event>(device_.type());
  ready->record(current_stream(device_));
  if (!request.allocate) home_ = current_stream(device_);
  request.begin = [ready, device = device_, begin = std::move(request.begin)] {
    if (begin) begin();
    ready->block(current_stream(device));
  };
  request.finish = [event = event_, device = device_, finish = std::move(request.finish)] {
    if (finish) finish();
    event->record(current_stream(device));
  };
}

void OutputEvent::wait(const at::Tensor& output) const {
  const c10::Stream stream = current_stream(device_);
  event_->block(stream);
  if (home_ != stream) record_on_stream(output, stream);
}

}  // namespace torch_ring
