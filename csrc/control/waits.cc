#include "control/waits.h"

#include <set>

#include "core/at.h"

namespace torch_ring {

bool Waits::learn(const Message& message) {
  const auto wait = message.wait();
  const auto [told, is_first] = told_.try_emplace({message.set, message.rank}, message);
  if (!is_first && wait.number <= told->second.wait().number) return false;
  told->second = message;
  return true;
}

void Waits::forget(std::uint64_t set) {
  std::erase_if(told_, [&](const auto& item) { return item.first.first == set; });
}

bool Waits::any(std::uint64_t set) const {
  for (auto told = told_.lower_bound({set, 0}); told != told_.end(); ++told) {
    if (told->first.first != set) break;
    if (!told->second.wait().ranks.empty()) return true;
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
    const auto told = told_.find({set, rank});
    if (told == told_.end() || told->second.wait().ranks.empty()) {
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
