#include "control/waits.h"

#include <set>

#include "core/at.h"

namespace torch_ring {

bool Waits::learn(const Message& message) {
  const auto wait = message.wait();
  std::uint64_t& last = at(last_, message.rank);
  if (wait.number <= last) return false;
  last = wait.number;
  const std::pair key{message.set, message.rank};
  if (wait.ranks.empty()) {
    told_.erase(key);
  } else {
    told_.insert_or_assign(key, message);
  }
  return true;
}

bool Waits::any(std::uint64_t set) const {
  const auto first = told_.lower_bound({set, 0});
  return first != told_.end() && first->first.first == set;
}

std::vector<int> Waits::ends(std::uint64_t set, std::span<const int> ranks) const {
  std::vector<int> left(ranks.begin(), ranks.end());
  std::set<int> seen(ranks.begin(), ranks.end());
  std::set<int> ends;
  while (!left.empty()) {
    const int rank = left.back();
    left.pop_back();
    const auto told = told_.find({set, rank});
    if (told == told_.end()) {
      ends.insert(rank);
      continue;
    }
    for (const int next : told->second.wait().ranks) {
      if (seen.insert(next).second) left.push_back(next);
    }
  }
  if (ends.empty()) return {ranks.begin(), ranks.end()};
  return {ends.begin(), ends.end()};
}

std::vector<Message> Waits::known() const {
  std::vector<Message> messages;
  for (const auto& [key, message] : told_) messages.push_back(message);
  return messages;
}

}  // namespace torch_ring
