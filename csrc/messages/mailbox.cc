#include "messages/mailbox.h"

#include <algorithm>
#include <utility>

namespace torch_ring {

namespace {

bool fits(const MessageSpec& receive, const Arrival& arrival) {
  return receive.tag == arrival.frame.tag &&
         receive.peer.value_or(arrival.source) == arrival.source;
}

}  // namespace

Mailbox::Receive Mailbox::arrive(Arrival&& arrival) {
  const auto found = std::ranges::find_if(
      receives_, [&](const Receive& receive) { return fits(receive->spec(), arrival); });
  if (found == receives_.end()) {
    arrivals_.push_back(std::move(arrival));
    return nullptr;
  }
  Receive receive = std::move(*found);
  receives_.erase(found);
  return receive;
}

std::optional<Arrival> Mailbox::post(const Receive& receive) {
  const auto found = std::ranges::find_if(
      arrivals_, [&](const Arrival& arrival) { return fits(receive->spec(), arrival); });
  if (found == arrivals_.end()) {
    receives_.push_back(receive);
    return std::nullopt;
  }
  Arrival arrival = std::move(*found);
  arrivals_.erase(found);
  return arrival;
}

}  // namespace torch_ring
