#include "engine/request.h"

#include <sstream>

namespace torch_ring {

const char* name_of(Collective collective) {
  constexpr const char* kNames[] = {"allreduce", "broadcast", "allgather", "barrier"};
  const auto index = static_cast<std::size_t>(collective);
  return index < 4 ? kNames[index] : "unknown collective";
}

std::size_t Fingerprint::count() const {
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  return count;
}

std::string Fingerprint::describe() const {
  std::ostringstream text;
  text << name_of(collective) << " '" << name << "'";
  if (collective == Collective::kBarrier) return text.str();
  text << ' ' << name_of(dtype) << " [";
  if (collective == Collective::kAllgather) text << (shape.empty() ? "*" : "*, ");
  for (std::size_t i = 0; i < shape.size(); ++i) text << (i > 0 ? ", " : "") << shape[i];
  text << ']';
  if (collective == Collective::kAllreduce) text << ' ' << name_of(op);
  if (collective == Collective::kBroadcast) text << " root " << root;
  if (prescale != 1.0) text << " prescale " << prescale;
  if (postscale != 1.0) text << " postscale " << postscale;
  if (device != 0) text << " device type " << int{device};
  return text.str();
}

}  // namespace torch_ring
