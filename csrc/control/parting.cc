#include "control/parting.h"

#include "control/poll_set.h"

namespace torch_ring {

void part(std::list<ControlLink>& links, std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  while (true) {
    PollSet polls;
    const auto now = Clock::now();
    links.remove_if([&](ControlLink& link) {
      link.flush(now);
      if (!link.pending()) link.end_sending();
      link.drain();
      if (link.ended()) return true;
      link.add_to(polls);
      return false;
    });
    if (links.empty() || now >= deadline) break;
    polls.wait(deadline);
  }
  links.clear();
}

}  // namespace torch_ring
