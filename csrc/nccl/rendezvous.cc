#include "nccl/rendezvous.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "core/error.h"
#include "nccl/loader.h"

namespace torch_ring::nccl {

namespace {

/// A rank's NCCL, for the other ranks.
struct PeerInfo {
  int version = 0;
  UniqueId id{};
  char problem[1024]{};  // why this rank has no NCCL; empty if it has
};

}  // namespace

Rendezvous rendezvous(Communicator& host, std::span<const std::string> labels,
                      const std::function<Api()>& load) {
  PeerInfo mine;
  std::optional<Api> api;
  try {
    api = load();
    mine.version = api->version;
    if (host.rank() == 0 && api->get_unique_id(&mine.id) != Result::kSuccess) {
      throw Error(ErrorKind::kInvalidArgument,
                  std::string("ncclGetUniqueId: ") + api->get_last_error(nullptr));
    }
  } catch (const Error& error) {
    std::strncpy(mine.problem, error.what(), sizeof mine.problem - 1);
  }

  const auto size = static_cast<std::size_t>(host.size());
  std::vector<PeerInfo> peers(size);
  host.allgather(&mine, peers.data(), std::vector<std::size_t>(size, sizeof mine));

  std::string problems;
  std::string versions;
  bool differ = false;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const PeerInfo& peer = peers[rank];
    const auto problem = std::string(peer.problem, ::strnlen(peer.problem, sizeof peer.problem));
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
  return {*api, peers[0].id};
}

}  // namespace torch_ring::nccl
