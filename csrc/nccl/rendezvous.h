// rendezvous(): the ranks load NCCL together and compare versions.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "collective/communicator.h"
#include "nccl/api.h"

namespace torch_ring::nccl {

/// The arguments of NcclCommunicator that the ranks have agreed on.
struct Rendezvous {
  Api api;
  UniqueId id;  // rank 0's
};

/// Loads NCCL on every rank of `host` and compares versions, because NCCL itself hangs, or worse,
/// if versions differ. Collective: every rank returns, or every rank throws the same
/// Error(kInvalidArgument), which names the ranks without NCCL, or each rank's version.
/// `labels`: by rank. `load`: as loader.h's. Other errors: `host`'s.
Rendezvous rendezvous(Communicator& host, std::span<const std::string> labels,
                      const std::function<Api()>& load);

}  // namespace torch_ring::nccl
