// SPDX-License-Identifier: Apache-2.0
#include "control/news.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/at.h"

namespace torch_ring {

bool Waits::learn(const Message& message) {
  const auto wait = message.wait();
  const auto [last, is_first] = last_.try_emplace({message.set, message.rank}, message);
  if (!is_first && wait.number <= last->second.wait().number) return false;
  last->second = message;
  return true;
}

void Waits::forget(std::uint64_t set) {
  std::erase_if(last_, [&](const auto& item) { return item.first.first == set; });
}

bool Waits::any(std::uint64_t set) const {
  for (auto last = last_.lower_bound({set, 0}); last != last_.end(); ++last) {
    if (last->first.first != set) break;
    if (!last->second.wait().ranks.empty()) return true;
  }
  return false;
}

std::vector<int> Waits::ends(std::uint64_t set, std::span<const int> ranks) const {
  std::vector<int> left(ranks.begin(), ranks.end());
  std::set<int> seen(ranks.begin(), ranks.end());
  std::set<int> ends;
  while (!left.empty()) {
    const int rank = left.back();
    left.pop_back();
    const auto last = last_.find({set, rank});
    if (last == last_.end() || last->second.wait().ranks.empty()) {
      ends.insert(rank);
      continue;
    }
    for (const int next : last->second.wait().ranks) {
      if (seen.insert(next).second) left.push_back(next);
    }
  }
  if (ends.empty()) return {ranks.begin(), ranks.end()};
  return {ends.begin(), ends.end()};
}

std::vector<Message> Waits::known() const {
  std::vector<Message> messages;
  for (const auto& [key, message] : last_) messages.push_back(message);
  return messages;
}

namespace {

/// Whether the number is above the last one, which it then replaces.
bool is_next(std::uint64_t& last, std::uint64_t number) {
  if (number <= last) return false;
  last = number;
  return true;
}

}  // namespace

bool News::learn(const Message& message) {
  const bool is_of_set = message.kind == Message::Kind::kLeft ||
                         message.kind == Message::Kind::kFailed ||
                         message.kind == Message::Kind::kWaits;
  if (is_of_set && has_ended(message.set)) return false;
  Fate& fate = at(fates_, message.rank);
  switch (message.kind) {
    case Message::Kind::kHeartbeat:
      return false;
    case Message::Kind::kDeparted:
    case Message::Kind::kLost:
      if (fate == Fate::kDeparted || fate == Fate::kLost) return false;
      fate = message.kind == Message::Kind::kLost ? Fate::kLost : Fate::kDeparted;
      break;
    case Message::Kind::kLeft:
      if (!left_[message.set].insert(message.rank).second) return false;
      if (static_cast<int>(left_[message.set].size()) == message.members()) {
        end(message.set);
        return true;
      }
      break;
    case Message::Kind::kFailed:
      if (!failed_.emplace(message.set, message.rank).second) return false;
      break;
    case Message::Kind::kStops:
      if (!points_.emplace(message.rank, message.rounds).second) return false;
      break;
    case Message::Kind::kWaits:
      return waits_.learn(message);
    case Message::Kind::kAsks:
      return is_next(asked_[message.rank], message.set);
    case Message::Kind::kAnswers:
      return is_next(answered_[{message.rank, message.recipient()}], message.set);
  }
  known_.push_back(message);
  return true;
}

/// Forgets all news of a set.
void News::end(std::uint64_t set) {
  left_.erase(set);
  std::erase_if(failed_, [&](const auto& item) { return item.first == set; });
  waits_.forget(set);
  std::erase_if(known_, [&](const Message& message) {
    const bool is_of_set =
        message.kind == Message::Kind::kLeft || message.kind == Message::Kind::kFailed;
    return is_of_set && message.set == set;
  });
  ended_.insert(set);
}

std::vector<Message> News::known() const {
  std::vector<Message> all = known_;
  for (Message& wait : waits_.known()) all.push_back(std::move(wait));
  return all;
}

std::optional<std::uint64_t> News::furthest_point() const {
  std::uint64_t furthest = 0;
  for (const auto& [rank, passed] : points_) furthest = std::max(furthest, passed);
  for (int rank = 0; rank < static_cast<int>(fates_.size()); ++rank) {
    if (alive(rank) && !points_.contains(rank)) return std::nullopt;
  }
  return furthest;
}

const Message* News::first_signal() const {
  return first([](const Message& message) {
    return message.kind == Message::Kind::kStops && !message.text.empty();
  });
}

const Message* News::first_loss_besides(int rank) const {
  return first([=](const Message& message) {
    return message.kind == Message::Kind::kLost && message.rank != rank;
  });
}

template <class Is>
const Message* News::first(Is&& is) const {
  const auto found = std::ranges::find_if(known_, is);
  return found == known_.end() ? nullptr : &*found;
}

void News::presume_departed(int rank) {
  if (alive(rank)) at(fates_, rank) = Fate::kPresumedDeparted;
}

bool News::alive(int rank) const { return at(fates_, rank) == Fate::kAlive; }

bool News::lost(int rank) const { return at(fates_, rank) == Fate::kLost; }

std::vector<int> News::lost() const {
  std::vector<int> found;
  for (int rank = 0; rank < static_cast<int>(fates_.size()); ++rank) {
    if (lost(rank)) found.push_back(rank);
  }
  return found;
}

bool News::has_failed(std::uint64_t set) const {
  const auto first = failed_.lower_bound({set, 0});
  return first != failed_.end() && first->first == set;
}

bool News::departed(int rank) const {
  return at(fates_, rank) == Fate::kDeparted || at(fates_, rank) == Fate::kPresumedDeparted;
}

std::optional<std::size_t> News::first_departed(std::span<const int> ranks) const {
  const auto found = std::ranges::find_if(ranks, [&](int rank) { return departed(rank); });
  if (found == ranks.end()) return std::nullopt;
  return static_cast<std::size_t>(found - ranks.begin());
}

}  // namespace torch_ring
