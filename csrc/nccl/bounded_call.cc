// SPDX-License-Identifier: Apache-2.0
#include "nccl/bounded_call.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace torch_ring::nccl {

namespace {

/// A call, shared by its caller and its thread.
struct Call {
  void run() {
    std::exchange(function, nullptr)();
    const std::scoped_lock lock(mutex);
    done = true;
    changed.notify_all();
  }

  std::function<void()> function;
  std::mutex mutex;  // guards `done`
  std::condition_variable changed;
  bool done = false;
};

}  // namespace

bool call_aside(std::function<void()> function) {
  try {
    std::thread(std::move(function)).detach();
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

bool call_bounded(std::function<void()> function, std::chrono::milliseconds patience) {
  const auto call = std::make_shared<Call>();
  call->function = std::move(function);
  if (!call_aside([call] { call->run(); })) call->run();
  std::unique_lock lock(call->mutex);
  return call->changed.wait_for(lock, patience, [&] { return call->done; });
}

}  // namespace torch_ring::nccl
