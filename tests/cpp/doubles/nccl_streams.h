// SPDX-License-Identifier: Apache-2.0
// double_api() and Stream: the NCCL double and its streams, loaded as NCCL is.
#pragma once

#include <dlfcn.h>

#include <functional>
#include <memory>
#include <utility>

#include "doubles/nccl_double.h"
#include "nccl/loader.h"
#include "nccl/nccl_communicator.h"

namespace torch_ring::test {

inline const nccl::Api& double_api() {
  static const nccl::Api api = nccl::load(NCCL_DOUBLE);
  return api;
}

template <class Function>
Function* double_symbol(const char* name) {
  static void* const library = dlopen(NCCL_DOUBLE, RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

inline NcclDoubleFaults& faults() {
  return *double_symbol<decltype(nccl_double_faults)>("nccl_double_faults")();
}

inline NcclDoubleCounts& counts() {
  return *double_symbol<decltype(nccl_double_counts)>("nccl_double_counts")();
}

/// Ends all simulated faults at the end of a test.
struct FaultsEnd {
  ~FaultsEnd() {
    faults().version = 22703;
    faults().in_progress = faults().async_error = faults().init_hangs = faults().hang = 0;
    faults().serial = 0;
    faults().end_hangs = 0;
  }
};

/// This thread's current GPU.
inline thread_local int current_gpu = 0;
[[maybe_unused]] inline const bool told_gpu = [] {
  double_symbol<decltype(nccl_double_tell_gpu)>("nccl_double_tell_gpu")([] { return current_gpu; });
  return true;
}();

/// Calls a function while the GPU is this thread's current one.
template <class Function>
auto on_gpu(int gpu, const Function& function) {
  struct Back {
    ~Back() { current_gpu = before; }
    int before;
  };
  const Back back{std::exchange(current_gpu, gpu)};
  return function();
}

struct Stream {
  explicit Stream(int gpu)
      : gpu(gpu),
        handle(
            double_symbol<decltype(nccl_double_stream_create)>("nccl_double_stream_create")(gpu)) {}
  ~Stream() {
    double_symbol<decltype(nccl_double_stream_destroy)>("nccl_double_stream_destroy")(handle);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  bool done() const {
    return double_symbol<decltype(nccl_double_stream_query)>("nccl_double_stream_query")(handle);
  }
  void synchronize() const {
    double_symbol<decltype(nccl_double_stream_synchronize)>("nccl_double_stream_synchronize")(
        handle);
  }
  void enqueue(std::function<void()> task) const {
    double_symbol<decltype(nccl_double_stream_enqueue)>("nccl_double_stream_enqueue")(
        handle,
        [](void* argument) {
          const std::unique_ptr<std::function<void()>> owned(
              static_cast<std::function<void()>*>(argument));
          (*owned)();
        },
        new std::function<void()>(std::move(task)));
  }

  const int gpu;
  const nccl::Stream handle;
};

/// The stream, for a communicator.
inline nccl::Device device_of(const Stream& stream) {
  nccl::Device device{stream.handle};
  device.use = [gpu = stream.gpu](const std::function<void()>& call) { on_gpu(gpu, call); };
  return device;
}

}  // namespace torch_ring::test
