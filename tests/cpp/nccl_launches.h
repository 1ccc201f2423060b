// SPDX-License-Identifier: Apache-2.0
// run_launches(), launch(), agree(): work on a device without an agreement and with one, on NCCL's
// double.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "nccl_ranks.h"

namespace torch_ring::test {

inline EngineConfig impatient() {
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(1000);  // of the first agreement, too
  return config;
}

/// Tensors of a rank that outlive its engine, whose stream may use them to the end.
using Tensors = std::deque<std::vector<float>>;

inline void run_launches(int size, const std::function<void(Rank&, Tensors&)>& fn,
                         const EngineConfig& config = patient()) {
  std::vector<Tensors> tensors(static_cast<std::size_t>(size));
  run_with_device(size, [&](Rank& rank) { fn(rank, at(tensors, rank.rank())); }, config);
}

inline Enqueue sum_of(std::vector<float>& values) {
  return [&values](Communicator& communicator, Buffers&) {
    communicator.allreduce(values.data(), values.data(), values.size(),
                           {DType::kFloat32, ReduceOp::kSum, {}});
  };
}

inline Fingerprint launched(const std::vector<float>& values) {
  Fingerprint what;
  what.name = "launched";
  what.device = kDevice;
  what.shape = {static_cast<std::int64_t>(values.size())};
  return what;
}

inline void launch(Rank& rank, std::vector<float>& values) {
  rank.engine().launch(launched(values), sum_of(values));
}

/// An agreed allreduce on the device, enqueued: it makes the device.
inline void agree(Rank& rank, std::vector<float>& values, const std::string& name) {
  std::atomic<bool> finished{false};
  rank.wait(submit(rank, values, name, finished));
}

}  // namespace torch_ring::test
