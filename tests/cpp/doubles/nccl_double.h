// A stand-in for libnccl.so.2 on machines without a GPU: NCCL's symbols over host memory, among the
// threads of one process. Its streams are queues with a thread each, so that whoever forgets to
// wait for a stream reads too early. No time measured on it says anything about NCCL.
#pragma once

#include <atomic>

#include "nccl/api.h"

extern "C" {

/// What goes wrong next, for all communicators.
struct NcclDoubleFaults {
  std::atomic<int> version{22703};
  std::atomic<int> in_progress{0};  // how often a call answers "in progress" before it succeeds
  std::atomic<int> async_error{0};  // what ncclCommGetAsyncError reports
  std::atomic<bool> init_hangs{false};
  std::atomic<int> aborted{0};    // counts ncclCommAbort
  std::atomic<int> destroyed{0};  // counts ncclCommDestroy
};
NcclDoubleFaults* nccl_double_faults();

torch_ring::nccl::Stream nccl_double_stream_create();
void nccl_double_stream_synchronize(torch_ring::nccl::Stream);
void nccl_double_stream_destroy(torch_ring::nccl::Stream);
/// Runs fn(argument) on the stream.
void nccl_double_stream_enqueue(torch_ring::nccl::Stream, void (*fn)(void*), void* argument);
}
