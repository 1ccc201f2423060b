// Rendezvous: how the ranks agree to use NCCL together.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "collective/communicator.h"
#include "nccl/api.h"

namespace torch_ring::nccl {

/// What NcclCommunicator is made with.
struct Rendezvous {
  Api api;
  UniqueId id;  // rank 0's
};

/// Loads NCCL on every rank of `host`, and compares. Collective: every rank gets as far, or throws
/// the same Error(kInvalidArgument), which says on which rank NCCL cannot be had, or who has which
/// version: NCCL itself would hang, or worse.
/// `labels`: by rank. `load`: as loader.h's. Other errors: `host`'s.
Rendezvous rendezvous(Communicator& host, std::span<const std::string> labels,
                      const std::function<Api()>& load);

}  // namespace torch_ring::nccl
