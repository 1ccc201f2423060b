// SPDX-License-Identifier: Apache-2.0
#include "control/graph.h"

#include <algorithm>
#include <numeric>

#include "core/at.h"

namespace torch_ring {

Graph::Graph(const std::vector<int>& host_of) : ring_(host_of.size()), position_(host_of.size()) {
  std::iota(ring_.begin(), ring_.end(), 0);
  std::stable_sort(ring_.begin(), ring_.end(),
                   [&](int one, int other) { return at(host_of, one) < at(host_of, other); });
  for (std::size_t i = 0; i < ring_.size(); ++i) at(position_, ring_[i]) = static_cast<int>(i);
}

std::vector<int> Graph::neighbours(int rank, const std::vector<bool>& present) const {
  const int size = static_cast<int>(ring_.size());
  std::vector<int> found;
  for (int distance = 1; distance <= size / 2; distance *= 2) {
    for (const int peer : {at_distance(rank, distance), at_distance(rank, -distance)}) {
      if (at(present, peer)) found.push_back(peer);
    }
  }
  for (const int step : {1, -1}) found.push_back(gap(rank, step, present).next);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  std::erase(found, rank);
  return found;
}

Graph::Gap Graph::gap(int rank, int step, const std::vector<bool>& present) const {
  Gap gap;
  for (gap.next = at_distance(rank, step); gap.next != rank && !at(present, gap.next);
       gap.next = at_distance(gap.next, step)) {
    gap.absent.push_back(gap.next);
  }
  return gap;
}

int Graph::at_distance(int rank, int distance) const {
  const int size = static_cast<int>(ring_.size());
  return at(ring_, (at(position_, rank) + distance + size) % size);
}

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
