// The NCCL double: a stand-in for libnccl.so.2 and for a device's streams and events.
//
// It needs no GPU. It has NCCL's symbols over host memory; its ranks are threads or processes of
// one machine. Each stream is a queue with a thread, so code that forgets to wait for a stream
// reads too early. Times measured on it do not apply to NCCL.
#pragma once

#include <atomic>
#include <cstdint>

#include "nccl/api.h"

extern "C" {

/// The faults to simulate, for all communicators of this process, and counters. Python reads it as
/// an array.
struct NcclDoubleFaults {
  std::atomic<int> version{22703};
  std::atomic<int> in_progress{0};  // how often a call answers "in progress" before it succeeds
  std::atomic<int> async_error{0};  // the report of ncclCommGetAsyncError
  std::atomic<int> init_hangs{0};
  std::atomic<int> aborted{0};    // counts ncclCommAbort
  std::atomic<int> destroyed{0};  // counts ncclCommDestroy
  std::atomic<int> hang{0};       // collectives wait on their stream until they are aborted
  // A GPU runs one operation of NCCL at a time, in the order of enqueueing, on all streams
  // together. Making a communicator counts as one, since NCCL may wait for the GPU in it. Set it
  // before.
  std::atomic<int> serial{0};
  std::atomic<int> end_hangs{0};  // ncclCommFinalize, ncclCommDestroy and ncclCommAbort
  std::atomic<int> freed{0};      // counts communicators that have ended
};
NcclDoubleFaults* nccl_double_faults();

/// Sets the function that returns the GPU on which the calling thread makes communicators; before,
/// it is 0.
void nccl_double_tell_gpu(int (*current)());

/// The number of collectives, or groups of them, that this process has put on streams.
std::int64_t nccl_double_launches();

torch_ring::nccl::Stream nccl_double_stream_create(int gpu);
/// Whether the stream has run all its tasks.
bool nccl_double_stream_query(torch_ring::nccl::Stream);
void nccl_double_stream_synchronize(torch_ring::nccl::Stream);
void nccl_double_stream_destroy(torch_ring::nccl::Stream);
/// Runs fn(argument) on the stream.
void nccl_double_stream_enqueue(torch_ring::nccl::Stream, void (*fn)(void*), void* argument);

/// Events, as CUDA's: an event is done when its stream has run the tasks that were enqueued before
/// its last recording; without a recording it is done. A wait is for the last recording before the
/// call.
void* nccl_double_event_create();
void nccl_double_event_record(void* event, torch_ring::nccl::Stream);
bool nccl_double_event_query(void* event);
/// Makes the stream wait, not the caller.
void nccl_double_event_wait(void* event, torch_ring::nccl::Stream);
void nccl_double_event_synchronize(void* event);
void nccl_double_event_destroy(void* event);
}
