// SPDX-License-Identifier: Apache-2.0
// OpaqueStream: a stream of the doubles, which is a queue and a thread that runs its tasks.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "doubles/gpu.h"
#include "nccl/api.h"

namespace torch_ring::nccl {

struct OpaqueStream {
  static constexpr std::size_t kMostTasks = 1024;

  explicit OpaqueStream(Gpu& gpu) : gpu(gpu), thread([this] { run(); }) {}
  ~OpaqueStream() {
    append(nullptr);
    thread.join();
  }

  /// Blocks while the queue is full, as a launch of CUDA does.
  void enqueue(std::function<void()> task) {
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return tasks.size() < kMostTasks; });
    }
    append(std::move(task));
  }

  void append(std::function<void()> task) {
    const std::scoped_lock lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }

  bool done() {
    const std::scoped_lock lock(mutex);
    return tasks.empty();
  }

  void synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return tasks.empty(); });
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return !tasks.empty(); });
      auto task = std::move(tasks.front());  // its entry stays in the queue until it is done
      if (!task) return;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      tasks.pop_front();
      changed.notify_all();
    }
  }

  Gpu& gpu;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::thread thread;
};

}  // namespace torch_ring::nccl
