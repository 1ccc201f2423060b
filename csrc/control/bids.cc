#include "control/bids.h"

#include <algorithm>

#include "core/at.h"

namespace torch_ring {

void Bids::add(int peer, Clock::time_point now, bool setup) {
  if (bids_.contains(peer)) return;
  const int rank = options_.rank;
  const Address& address = at(options_.addresses, peer);
  const bool unix = at(options_.host_of, peer) == at(options_.host_of, rank);
  if (rank > peer) {
    const Hello hello{static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(peer), 0,
                      Hello::kControl};
    bids_.try_emplace(peer, now, Outgoing(address, unix, options_.key, hello));
  } else {
    bids_.try_emplace(peer, now, Outgoing(address, unix, setup ? kSetupProbe : kProbe, now));
  }
}

Bids::Outcome Bids::advance(const PollSet& polls, Clock::time_point now, bool setup) {
  Outcome outcome;
  for (auto bid = bids_.begin(); bid != bids_.end();) {
    auto& [peer, it] = *bid;
    auto state = Outgoing::State::kPending;
    try {
      state = it.outgoing.advance(polls, now);
    } catch (const Error& error) {
      outcome.error.emplace(peer, error);
      // Another key: its address belongs to somebody else now.
      if (error.kind() == ErrorKind::kMismatch) state = Outgoing::State::kRefused;
      it.since = now;  // it is not the peer that is silent
    }
    if (!it.outgoing.trouble().empty()) {
      trouble_ = at(options_.labels, peer) + ": " + it.outgoing.trouble();
    }
    if (state == Outgoing::State::kRefused && !it.refused_since) it.refused_since = now;
    if (state == Outgoing::State::kDone) it.refused_since.reset();
    if (state == Outgoing::State::kDone && options_.rank > peer) {
      outcome.connected.emplace_back(peer, it.outgoing.take());
      bid = bids_.erase(bid);
      continue;
    }
    if (it.refused_since && (setup || now >= *it.refused_since + kGrace)) {
      outcome.refused.push_back(peer);
    } else if (!setup && now >= it.since + options_.heartbeat_timeout) {
      outcome.silent.push_back(peer);
    }
    ++bid;
  }
  return outcome;
}

void Bids::excuse(Clock::time_point now) {
  for (auto& [peer, bid] : bids_) {
    bid.since = now;
    bid.refused_since.reset();
  }
}

void Bids::add_to(PollSet& polls) {
  for (auto& [peer, bid] : bids_) bid.outgoing.add_to(polls);
}

Clock::time_point Bids::due(bool setup) const {
  auto due = Clock::time_point::max();
  for (const auto& [peer, bid] : bids_) {
    due = std::min(due, bid.outgoing.due());
    if (setup) continue;
    due = std::min(due, bid.since + options_.heartbeat_timeout);
    if (bid.refused_since) due = std::min(due, *bid.refused_since + kGrace);
  }
  return due;
}

void Bids::append_descriptors(std::vector<int>& fds) const {
  for (const auto& [peer, bid] : bids_) fds.push_back(bid.outgoing.fd());
}

}  // namespace torch_ring
