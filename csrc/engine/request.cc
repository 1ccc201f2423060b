#include "engine/request.h"

#include <iterator>
#include <numeric>
#include <sstream>

#include "core/at.h"
#include "engine/backward_messages.h"

namespace torch_ring {

const char* name_of(Collective collective) {
  constexpr const char* kNames[] = {"allreduce",     "broadcast", "allgather", "alltoall",
                                    "reducescatter", "reduce",    "gather",    "scatter",
                                    "barrier",       "fence",     "join"};
  const auto index = static_cast<std::size_t>(collective);
  return index < std::size(kNames) ? kNames[index] : "unknown collective";
}

std::size_t Fingerprint::count() const {
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  return count;
}

std::string Fingerprint::describe() const {
  if (collective == Collective::kJoin) return name_of(collective);
  const auto purpose = in_words(name);
  if (purpose && collective == Collective::kAllgather) return *purpose;  // of bytes, or of rows
  std::ostringstream text;
  text << purpose.value_or(std::string(name_of(collective)) + " '" + name + "'");
  if (is_barrier(collective)) return text.str();
  text << ' ' << name_of(dtype) << " [";
  const bool ragged = collective == Collective::kAllgather || collective == Collective::kAlltoall;
  if (ragged) text << (shape.empty() ? "*" : "*, ");
  for (std::size_t i = 0; i < shape.size(); ++i) text << (i > 0 ? ", " : "") << shape[i];
  text << ']';
  if (reduces(collective)) text << ' ' << name_of(op);
  if (has_root(collective)) text << " root " << root;
  if (prescale != 1.0) text << " prescale " << prescale;
  if (postscale != 1.0) text << " postscale " << postscale;
  if (group > 0) text << " in a group of " << group;
  if (device == 1) text << " on cuda";
  if (device > 1) text << " on device type " << int{device};
  return text.str();
}

std::size_t Request::input_bytes() const {
  const Fingerprint& f = fingerprint;
  const bool has_rows =
      f.collective == Collective::kAllgather || f.collective == Collective::kAlltoall;
  const auto sent = static_cast<std::ptrdiff_t>(f.tells_expected ? rows.size() / 2 : rows.size());
  const std::int64_t count =
      has_rows ? std::accumulate(rows.begin(), rows.begin() + sent, std::int64_t{0}) : 1;
  return static_cast<std::size_t>(count) * f.count() * size_of(f.dtype);
}

std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size) {
  std::vector<std::int64_t> shares(static_cast<std::size_t>(size), rows / size);
  for (int rank = 0; rank < rows % size; ++rank) ++at(shares, rank);
  return shares;
}

}  // namespace torch_ring
