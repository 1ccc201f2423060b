#include "control/neighbourhood.h"

#include <algorithm>

#include "core/at.h"

namespace torch_ring {

Neighbourhood::Neighbourhood(int rank, const std::vector<int>& host_of)
    : rank_(rank), graph_(host_of), present_(host_of.size(), true), lost_(host_of.size(), false) {}

void Neighbourhood::lose(int rank) {
  at(present_, rank) = false;
  at(lost_, rank) = true;
}

void Neighbourhood::depart(int rank, Clock::time_point now) {
  leaving_.emplace_back(now + kSettle, rank);
}

void Neighbourhood::settle(Clock::time_point now) {
  for (; !leaving_.empty() && leaving_.front().first <= now; leaving_.pop_front()) {
    at(present_, leaving_.front().second) = false;
  }
}

Clock::time_point Neighbourhood::next_change() const {
  return leaving_.empty() ? Clock::time_point::max() : leaving_.front().first;
}

bool Neighbourhood::behind_departed(int peer) const {
  const auto lost = [&](int rank) { return at(lost_, rank); };
  for (const int step : {1, -1}) {
    const auto [absent, next] = graph_.gap(rank_, step, present_);
    if (next == peer && !absent.empty() && std::ranges::none_of(absent, lost)) return true;
  }
  return false;
}

}  // namespace torch_ring
