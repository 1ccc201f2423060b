#include "nccl/rendezvous.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "core/error.h"
#include "nccl/loader.h"

namespace torch_ring::nccl {

namespace {

/// What a rank tells the others.
struct Card {
  int version = 0;
  UniqueId id{};
  char problem[1024]{};  // why there is no NCCL here, if so
};

}  // namespace

Meeting meet(Communicator& host, std::span<const std::string> labels,
             const std::function<Api()>& load) {
  Card mine;
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
  std::vector<Card> cards(size);
  host.allgather(&mine, cards.data(), std::vector<std::size_t>(size, sizeof mine));

  std::string problems;
  std::string versions;
  bool differ = false;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const Card& card = cards[rank];
    const auto problem = std::string(card.problem, ::strnlen(card.problem, sizeof card.problem));
    if (!problem.empty()) {
      problems += (problems.empty() ? "" : "; ") + labels[rank] + ": " + problem;
    }
    versions += (rank == 0 ? "" : ", ") + labels[rank] + " has " + version_text(card.version);
    differ = differ || card.version != cards[0].version;
  }
  if (!problems.empty()) throw Error(ErrorKind::kInvalidArgument, problems);
  if (differ) {
    throw Error(ErrorKind::kInvalidArgument, "the ranks have different NCCLs: " + versions +
                                                 "; install the same one everywhere");
  }
  return {*api, cards[0].id};
}

}  // namespace torch_ring::nccl
