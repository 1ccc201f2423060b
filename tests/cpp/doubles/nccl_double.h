// A stand-in for libnccl.so.2 and for a device's streams and events on machines without a GPU:
// NCCL's symbols over host memory, among ranks that are threads or processes of one machine. Its
// streams are queues with a thread each, so that whoever forgets to wait for a stream reads too
// early. No time measured on it says anything about NCCL.
#pragma once

#include <atomic>

#include "nccl/api.h"

extern "C" {

/// What goes wrong next, for all communicators of this process. Python reads it as an array.
struct NcclDoubleFaults {
  std::atomic<int> version{22703};
  std::atomic<int> in_progress{0};  // how often a call answers "in progress" before it succeeds
  std::atomic<int> async_error{0};  // what ncclCommGetAsyncError reports
  std::atomic<int> init_hangs{0};
  std::atomic<int> aborted{0};    // counts ncclCommAbort
  std::atomic<int> destroyed{0};  // counts ncclCommDestroy
  std::atomic<int> hang{0};       // what streams run of a communicator waits until it is aborted
};
NcclDoubleFaults* nccl_double_faults();

torch_ring::nccl::Stream nccl_double_stream_create();
/// Whether everything that was enqueued is done.
bool nccl_double_stream_query(torch_ring::nccl::Stream);
void nccl_double_stream_synchronize(torch_ring::nccl::Stream);
void nccl_double_stream_destroy(torch_ring::nccl::Stream);
/// Runs fn(argument) on the stream.
void nccl_double_stream_enqueue(torch_ring::nccl::Stream, void (*fn)(void*), void* argument);

/// Events are CUDA's: they stand for what their stream had to do when they were recorded last, and
/// for nothing before that. Who waits waits for the recording that is the last one at the call.
void* nccl_double_event_create();
void nccl_double_event_record(void* event, torch_ring::nccl::Stream);
bool nccl_double_event_query(void* event);
/// The stream waits, not the caller.
void nccl_double_event_wait(void* event, torch_ring::nccl::Stream);
void nccl_double_event_synchronize(void* event);
void nccl_double_event_destroy(void* event);
}
