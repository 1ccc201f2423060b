// SPDX-License-Identifier: Apache-2.0
// rendezvous(): the ranks load NCCL together, and compare versions and GPUs.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>

#include "collective/communicator.h"
#include "nccl/api.h"

namespace torch_ring::nccl {

/// The arguments of NcclCommunicator that the ranks have agreed on.
struct Rendezvous {
  Api api;
  UniqueId id;  // rank 0's
};

/// The GPU of a rank. NCCL takes one rank for each GPU of a host. Empty: unknown.
struct GpuPlace {
  std::string host;
  std::string uuid;
};

/// A rank's own NCCL and GPU.
struct Loaded {
  Loaded(Api api, GpuPlace gpu = {}) : api(std::move(api)), gpu(std::move(gpu)) {}
  Api api;
  GpuPlace gpu;
};

/// Loads NCCL on every rank of `host` and compares versions, because NCCL itself hangs, or worse,
/// if versions differ; and GPUs, because NCCL's error names neither ranks nor remedy. Collective:
/// every rank returns, or every rank throws the same Error(kInvalidArgument), which names the ranks
/// without NCCL, each rank's version, or the ranks on one GPU.
/// `labels`: by rank. `load`: as loader.h's, with the rank's GPU. Other errors: `host`'s.
Rendezvous rendezvous(Communicator& host, std::span<const std::string> labels,
                      const std::function<Loaded()>& load);

}  // namespace torch_ring::nccl
