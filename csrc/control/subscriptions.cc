#include "control/subscriptions.h"

#include <algorithm>
#include <utility>

#include "core/at.h"

namespace torch_ring {

Subscriptions::Subscriptions(int rank, std::vector<std::string> labels)
    : rank_(rank), labels_(std::move(labels)), departed_(labels_.size(), false) {}

void Subscriptions::add(std::uint64_t set, std::vector<int> members, ControlObserver& observer) {
  std::ranges::sort(members);
  const std::scoped_lock lock(mutex_);
  const auto [place, added] = subscriptions_.try_emplace(set, std::move(members), &observer);
  if (!added) {
    throw Error(ErrorKind::kInvalidArgument,
                "process set " + std::to_string(set) + " has an observer already");
  }
  for (const Message& news : told_) tell(set, place->second, news);
}

void Subscriptions::remove(std::uint64_t set) {
  const std::scoped_lock lock(mutex_);
  subscriptions_.erase(set);
}

void Subscriptions::tell(const Message& news) {
  const std::scoped_lock lock(mutex_);
  if (news.kind == Message::Kind::kDeparted) {
    if (at(departed_, news.rank)) return;
    at(departed_, news.rank) = true;
  }
  told_.push_back(news);
  for (const auto& [set, subscription] : subscriptions_) tell(set, subscription, news);
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
      return;
    case Message::Kind::kDeparted:
      return observer.on_departed(news.rank);
    case Message::Kind::kLost:
      return observer.on_lost(news.rank, describe(news));
    case Message::Kind::kFailed:
      if (news.set == set) observer.on_failed(news.rank, news.error, news.text);
  }
}

std::string Subscriptions::describe(const Message& lost) const {
  const std::string what = at(labels_, lost.rank) + ' ' + lost.text;
  return lost.reporter == rank_ ? what : at(labels_, lost.reporter) + " says that " + what;
}

}  // namespace torch_ring
