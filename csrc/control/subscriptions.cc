// SPDX-License-Identifier: Apache-2.0
#include "control/subscriptions.h"

#include <algorithm>
#include <utility>

#include "control/news.h"
#include "core/at.h"

namespace torch_ring {

Subscriptions::Subscriptions(int rank, std::vector<std::string> labels)
    : rank_(rank), labels_(std::move(labels)) {}

void Subscriptions::add(std::uint64_t set, std::vector<int> members, ControlObserver& observer) {
  std::ranges::sort(members);
  const std::scoped_lock lock(mutex_);
  const auto [place, added] = subscriptions_.try_emplace(set, std::move(members), &observer);
  if (!added) {
    throw Error(ErrorKind::kInvalidArgument,
                "process set " + std::to_string(set) + " has an observer already");
  }
  for (const Message& news : news_) tell(set, place->second, news);
  for (const int rank : presumed_) tell_presumed(rank, place->second);
}

void Subscriptions::remove(std::uint64_t set) {
  const std::scoped_lock lock(mutex_);
  subscriptions_.erase(set);
}

void Subscriptions::tell(const Message& news) {
  const std::scoped_lock lock(mutex_);
  news_.push_back(news);
  for (const auto& [set, subscription] : subscriptions_) tell(set, subscription, news);
}

void Subscriptions::forget(std::uint64_t set) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(news_, [&](const Message& news) {
    const bool is_of_set = news.kind == Message::Kind::kLeft || news.kind == Message::Kind::kFailed;
    return is_of_set && news.set == set;
  });
}

void Subscriptions::tell_presumed(int rank) {
  const std::scoped_lock lock(mutex_);
  presumed_.push_back(rank);
  for (const auto& [set, subscription] : subscriptions_) tell_presumed(rank, subscription);
}

void Subscriptions::tell_presumed(int rank, const Subscription& subscription) {
  if (!std::ranges::binary_search(subscription.members, rank)) return;
  subscription.observer->on_departed(rank, std::nullopt, {});
}

void Subscriptions::tell_connected(std::uint64_t set) {
  const std::scoped_lock lock(mutex_);
  const auto found = subscriptions_.find(set);
  if (found != subscriptions_.end()) found->second.observer->on_connected();
}

void Subscriptions::tell(std::uint64_t set, const Subscription& subscription,
                         const Message& news) const {
  if (!std::ranges::binary_search(subscription.members, news.rank)) return;
  ControlObserver& observer = *subscription.observer;
  switch (news.kind) {
    case Message::Kind::kHeartbeat:
    case Message::Kind::kWaits:
    case Message::Kind::kAsks:
    case Message::Kind::kAnswers:
    case Message::Kind::kStops:
      return;
    case Message::Kind::kLeft:
      if (news.set == set_of(set)) observer.on_departed(news.rank, news.rounds, news.text);
      return;
    case Message::Kind::kDeparted:  // the first news for a set that it has not used
      return observer.on_departed(news.rank, 0, news.text);
    case Message::Kind::kLost:
      return observer.on_lost(news.rank, describe(news));
    case Message::Kind::kFailed:
      if (news.set == set_of(set)) observer.on_failed(news.rank, news.error, news.text);
  }
}

std::string Subscriptions::describe(const Message& lost) const {
  const std::string what = at(labels_, lost.rank) + ' ' + lost.text;
  if (lost.reporter == rank_) return what;
  const std::string& reporter = at(labels_, lost.reporter);
  if (lost.rank != rank_) return reporter + " says that " + what;
  return reporter + " has given up this rank, which lives; it says that " + what;
}

}  // namespace torch_ring
