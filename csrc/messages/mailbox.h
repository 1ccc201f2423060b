// Mailbox: which message goes to which receive.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "messages/message_request.h"
#include "messages/message_stream.h"

namespace torch_ring {

/// A message that has arrived: itself, or the offer of it.
struct Arrival {
  int source = 0;  // rank of the set
  MessageFrame frame;
  std::vector<std::byte> bytes;  // of a kWhole
};

/// Matches as MPI and gloo do: a message goes to the first receive of its tag that takes its
/// source's messages, a receive gets the first message to have arrived. A rank's messages with one
/// tag arrive in the order in which they were sent, so they are matched in that order.
///
/// Thread: one at a time. Cost: of the receives or messages that wait, each is looked at.
class Mailbox {
 public:
  using Receive = std::shared_ptr<MessageRequest>;

  /// The receive that gets a message; keeps the message if there is none.
  Receive arrive(Arrival&& arrival);

  /// The message that a receive gets; keeps the receive if there is none.
  std::optional<Arrival> post(const Receive& receive);

  /// Takes out the receives of which `is_chosen` holds.
  template <class IsChosen>
  std::vector<Receive> take(IsChosen&& is_chosen) {
    std::vector<Receive> taken;
    std::erase_if(receives_, [&](const Receive& receive) {
      const bool chosen = is_chosen(*receive);
      if (chosen) taken.push_back(receive);
      return chosen;
    });
    return taken;
  }

 private:
  std::list<Receive> receives_;
  std::list<Arrival> arrivals_;
};

}  // namespace torch_ring
