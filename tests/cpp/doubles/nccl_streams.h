// double_api() and Stream: the NCCL double and its streams, loaded as NCCL is.
#pragma once

#include <dlfcn.h>

#include <functional>
#include <memory>
#include <utility>

#include "doubles/nccl_double.h"
#include "nccl/loader.h"

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

/// Ends all simulated faults at the end of a test.
struct FaultsEnd {
  ~FaultsEnd() {
    faults().version = 22703;
    faults().in_progress = faults().async_error = faults().init_hangs = faults().hang = 0;
    faults().serial = 0;
    faults().end_hangs = 0;
  }
};

/// The GPU on which this thread makes communicators.
inline thread_local int current_gpu = 0;
[[maybe_unused]] inline const bool told_gpu = [] {
  double_symbol<decltype(nccl_double_tell_gpu)>("nccl_double_tell_gpu")([] { return current_gpu; });
  return true;
}();

struct Stream {
  explicit Stream(int gpu = 0)
      : handle(
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

  const nccl::Stream handle;
};

}  // namespace torch_ring::test
