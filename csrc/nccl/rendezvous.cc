// SPDX-License-Identifier: Apache-2.0
#include "nccl/rendezvous.h"

#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "nccl/loader.h"

namespace torch_ring::nccl {

namespace {

/// A rank's NCCL and GPU, for the other ranks. The texts end with a zero.
struct PeerInfo {
  int version = 0;
  UniqueId id{};
  char host[256]{};      // of the GPU
  char uuid[64]{};       // of the GPU; empty: unknown
  char problem[1024]{};  // the reason why this rank has no NCCL; empty if it has
};

template <std::size_t size>
void put(char (&to)[size], const std::string& text) {
  std::strncpy(to, text.c_str(), size - 1);
}

template <std::size_t size>
std::string text_in(const char (&from)[size]) {
  return std::string(from, ::strnlen(from, size));
}

/// "rank 0 (pid 7), rank 1 (pid 8) use one GPU (its UUID)", for each GPU with several ranks.
std::string shared_gpus(std::span<const PeerInfo> peers, std::span<const std::string> labels) {
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> ranks;  // by GPU
  for (std::size_t rank = 0; rank < peers.size(); ++rank) {
    const PeerInfo& peer = peers[rank];
    if (*peer.uuid) ranks[{text_in(peer.host), text_in(peer.uuid)}].push_back(labels[rank]);
  }
  std::string text;
  for (const auto& [gpu, sharing] : ranks) {
    if (sharing.size() < 2) continue;
    for (std::size_t i = 0; i < sharing.size(); ++i) {
      text += (i > 0 ? ", " : text.empty() ? "" : "; ") + sharing[i];
    }
    text += " use one GPU (" + gpu.second + ")";
  }
  return text;
}

}  // namespace

Rendezvous rendezvous(Communicator& host, std::span<const std::string> labels,
                      const std::function<Loaded()>& load) {
  PeerInfo mine;
  std::optional<Api> api;
  try {
    const Loaded loaded = load();
    api = loaded.api;
    mine.version = api->version;
    put(mine.host, loaded.gpu.host);
    put(mine.uuid, loaded.gpu.uuid);
    if (host.rank() == 0 && api->get_unique_id(&mine.id) != Result::kSuccess) {
      throw Error(ErrorKind::kInvalidArgument,
                  std::string("ncclGetUniqueId: ") + api->get_last_error(nullptr));
    }
  } catch (const Error& error) {
    put(mine.problem, error.what());
  }

  const auto size = static_cast<std::size_t>(host.size());
  std::vector<PeerInfo> peers(size);
  host.allgather(&mine, peers.data(), std::vector<std::size_t>(size, sizeof mine));

  std::string problems;
  std::string versions;
  bool differ = false;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const PeerInfo& peer = peers[rank];
    const std::string problem = text_in(peer.problem);
    if (!problem.empty()) {
      problems += (problems.empty() ? "" : "; ") + labels[rank] + ": " + problem;
    }
    versions += (rank == 0 ? "" : ", ") + labels[rank] + " has " + version_text(peer.version);
    differ = differ || peer.version != peers[0].version;
  }
  if (!problems.empty()) throw Error(ErrorKind::kInvalidArgument, problems);
  if (differ) {
    throw Error(ErrorKind::kInvalidArgument, "the ranks have different NCCLs: " + versions +
                                                 "; install the same one everywhere");
  }
  if (const std::string shared = shared_gpus(peers, labels); !shared.empty()) {
    throw Error(ErrorKind::kInvalidArgument,
                shared +
                    ", but NCCL takes one rank for each GPU: call "
                    "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count()) before "
                    "the first tensor is on a GPU, and start no more ranks on a host than it has "
                    "GPUs");
  }
  return {*api, peers[0].id};
}

}  // namespace torch_ring::nccl
