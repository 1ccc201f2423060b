// SPDX-License-Identifier: Apache-2.0
#include "doubles/gpu.h"

#include <map>

namespace torch_ring::nccl {

Gpu& Gpu::of(int number) {
  // Never freed: streams may live as long as the process.
  static auto* const mutex = new std::mutex;
  static auto* const gpus = new std::map<int, Gpu>;
  const std::scoped_lock lock(*mutex);
  return gpus->try_emplace(number, number).first->second;
}

}  // namespace torch_ring::nccl
