// SPDX-License-Identifier: Apache-2.0
// The NCCL double: a stand-in for libnccl.so.2 and for a device's streams and events.
//
// It needs no GPU. It has NCCL's symbols over host memory; its ranks are threads or processes of
// one machine. Each stream is a queue with a thread, so code that forgets to wait for a stream
// reads too early. Times measured on it do not apply to NCCL.
//
// Where NCCL may be strict, the double is:
//  - Each call is launched by a thread and answers "in progress". Until ncclCommGetAsyncError has
//    told its success, other calls are refused, and its events would come too early.
//  - The first collective of each kind waits for the hosts of all ranks, and the first message for
//    the other host.
//  - ncclCommDestroy and ncclCommAbort end when all ranks of the host have called one of them, or
//    have died.
//  - Calls on a thread whose current device is not the communicator's, and two ranks on one GPU,
//    are refused.
//  - Collectives that are a group on one rank, and another or none on the others, hang.
//  - ncclAvg multiplies each input by 1/n, rounded to the dtype.
//  - Ranks add in another order for each size. The root of a small broadcast ends at once.
#pragma once

#include <atomic>
#include <cstdint>

#include "nccl/api.h"

extern "C" {

/// The faults to simulate, for all communicators of this process, and counters. Python reads it as
/// an array.
struct NcclDoubleFaults {
  std::atomic<int> version{22703};
  std::atomic<int> in_progress{0};  // more polls that a launch needs
  std::atomic<int> async_error{0};  // the report of ncclCommGetAsyncError
  std::atomic<int> init_hangs{0};
  std::atomic<int> aborted{0};    // counts ncclCommAbort
  std::atomic<int> destroyed{0};  // counts ncclCommDestroy
  std::atomic<int> hang{0};       // collectives wait on their stream until they are aborted
  // A GPU runs one operation of NCCL at a time, in the order of enqueueing, on all streams
  // together. Making a communicator counts as one, since NCCL may wait for the GPU in it. Set it
  // before.
  std::atomic<int> serial{0};
  std::atomic<int> end_hangs{0};  // ncclCommDestroy and ncclCommAbort
  std::atomic<int> freed{0};      // counts communicators that have ended
};
NcclDoubleFaults* nccl_double_faults();

/// Sets the function that returns the calling thread's current GPU, or -1 after an error there,
/// when NCCL's calls fail; before, it is 0.
void nccl_double_tell_gpu(int (*current)());

/// The launches of all communicators of this process.
struct NcclDoubleCounts {
  std::atomic<std::int64_t> launches{0};  // collectives, or groups of them
  std::atomic<std::int64_t> threads{0};
  std::atomic<std::int64_t> polls{0};       // ncclCommGetAsyncError during a launch
  std::atomic<std::int64_t> sleeps{0};      // of the calling thread, while it polls
  std::atomic<std::int64_t> misgrouped{0};  // launches that hang because ranks group differently
};
NcclDoubleCounts* nccl_double_counts();

torch_ring::nccl::Stream nccl_double_stream_create(int gpu);
/// Whether the stream has run all its tasks.
bool nccl_double_stream_query(torch_ring::nccl::Stream);
void nccl_double_stream_synchronize(torch_ring::nccl::Stream);
void nccl_double_stream_destroy(torch_ring::nccl::Stream);
int nccl_double_stream_gpu(torch_ring::nccl::Stream);
/// Runs fn(argument) on the stream. Blocks while 1024 tasks wait there, as a launch of CUDA does.
void nccl_double_stream_enqueue(torch_ring::nccl::Stream, void (*fn)(void*), void* argument);
/// The same, without a limit.
void nccl_double_stream_append(torch_ring::nccl::Stream, void (*fn)(void*), void* argument);

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
