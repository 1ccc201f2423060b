// SPDX-License-Identifier: Apache-2.0
// The streams and events of the doubles.
#include <chrono>
#include <future>
#include <memory>

#include "doubles/nccl_double.h"
#include "doubles/opaque_stream.h"

using torch_ring::nccl::OpaqueStream;
using torch_ring::nccl::Stream;

namespace {

struct Event {
  std::shared_future<void> last;  // of the last recording
};
Event& event_of(void* event) { return *static_cast<Event*>(event); }

}  // namespace

extern "C" {

Stream nccl_double_stream_create(int gpu) {
  return new OpaqueStream(torch_ring::nccl::Gpu::of(gpu));
}
bool nccl_double_stream_query(Stream stream) { return stream->done(); }
void nccl_double_stream_synchronize(Stream stream) { stream->synchronize(); }
int nccl_double_stream_gpu(Stream stream) { return stream->gpu.number; }
void nccl_double_stream_append(Stream stream, void (*fn)(void*), void* argument) {
  stream->append([=] { fn(argument); });
}
void nccl_double_stream_destroy(Stream stream) { delete stream; }
void nccl_double_stream_enqueue(Stream stream, void (*fn)(void*), void* argument) {
  stream->enqueue([=] { fn(argument); });
}

void* nccl_double_event_create() { return new Event; }
void nccl_double_event_record(void* event, Stream stream) {
  const auto reached = std::make_shared<std::promise<void>>();
  event_of(event).last = reached->get_future();
  stream->enqueue([reached] { reached->set_value(); });
}
bool nccl_double_event_query(void* event) {
  const auto& last = event_of(event).last;
  return !last.valid() || last.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}
void nccl_double_event_wait(void* event, Stream stream) {
  const auto last = event_of(event).last;
  if (last.valid()) stream->enqueue([last] { last.wait(); });
}
void nccl_double_event_synchronize(void* event) {
  if (event_of(event).last.valid()) event_of(event).last.wait();
}
void nccl_double_event_destroy(void* event) { delete &event_of(event); }
}
