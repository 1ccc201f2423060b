// SPDX-License-Identifier: Apache-2.0
// PromisedLaunches: collectives on a device that all ranks have agreed upon together, in advance.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "gradients/run_ahead.h"

namespace torch_ring {

/// A series of collectives of a process set on its device. A rank *promises* it to the others in
/// one agreement (torch_ring/collectives/promised_series.py), and then launches it without any.
///
/// All ranks keep a promise, in its order, with nothing else on the device in between: when the
/// program asks the set for anything else first (Engine::Watch), NaN is launched for the rest. So
/// no rank waits for a launch that never comes, and none takes another operation's data for its
/// own. The ranks compare in their next agreement what they have left.
///
/// Thread: any, without the GIL. Blocking: as Engine::launch(). Errors: the engine's.
class PromisedLaunches : public std::enable_shared_from_this<PromisedLaunches> {
 public:
  /// One collective of contiguous floating-point numbers.
  struct Item {
    bool gathers = false;  // an allgather of one row a rank; otherwise a sum in place
    std::int64_t count = 0;
    bool is_double = false;
    bool operator==(const Item&) const = default;
  };

  PromisedLaunches(std::weak_ptr<Engine> engine, int size)
      : engine_(std::move(engine)), size_(size) {}

  /// Begins a series of this thread, and watches it. `promised` may be empty: then the program
  /// agrees on each of its collectives, and calls this again after each one. Ends the series
  /// before. `in_backward`: the thread is one of autograd, for which the program waits.
  void begin(std::vector<Item> promised, c10::Device device, bool in_backward);

  /// Whether the program has asked for anything else since begin().
  bool is_interrupted();

  /// Launches the next promised collective, after the work on the current stream; nothing if it is
  /// another one, or if the promise is kept.
  std::optional<Launched> launch(const at::Tensor& tensor, bool gathers);

  /// Keeps the promise, and ends the watch. Returns the number of its collectives that the program
  /// has left.
  std::size_t end();

  /// Engine::launches(), or -1.
  std::int64_t place() const;

 private:
  // Under mutex_:
  Launched launch_next(const at::Tensor& tensor);
  void keep();

  void watch(std::vector<std::thread::id> threads);

  const std::weak_ptr<Engine> engine_;
  const int size_;
  std::mutex mutex_;  // guards the members below; locked before the engine's
  std::vector<Item> promised_;
  std::size_t next_ = 0;  // in promised_
  std::size_t left_ = 0;
  bool is_interrupted_ = false;
  c10::Device device_ = at::kCPU;
  std::thread::id program_;  // the thread of the last series outside of autograd
};

}  // namespace torch_ring
