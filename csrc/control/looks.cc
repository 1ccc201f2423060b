#include "control/looks.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace torch_ring {

namespace {

using std::chrono::milliseconds;

// Answers that never come: their ranks are lost.
constexpr std::size_t kMostUnanswered = 1000;

constexpr const char* kSilence = "not answering";

constexpr std::size_t kMostBytes = 300;  // of a line

std::pair<std::string_view, std::string_view> first_line(std::string_view text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  return {text.substr(0, end), text.substr(std::min(end + 1, text.size()))};
}

}  // namespace

void Looks::begin(std::uint64_t number, int rank, Clock::time_point now) {
  if (unanswered_.size() == kMostUnanswered) unanswered_.erase(unanswered_.begin());
  unanswered_.emplace(number, Look{rank, now});
}

void Looks::end(std::uint64_t number, Clock::time_point now) {
  const auto look = unanswered_.find(number);
  if (look == unanswered_.end()) return;
  look->second.is_over = true;
  if (now - look->second.since > kPrompt) add(look->second.rank, {kSilence});
}

bool Looks::learn(std::uint64_t number, int from, std::string_view answer, Clock::time_point now) {
  const auto look = unanswered_.find(number);
  if (look == unanswered_.end()) return false;
  const auto& [rank, since, is_over] = look->second;
  if (from != rank) return true;  // who answers for another one is not believed
  if (!is_over && now - since > kPatience) {
    add(rank, {kSilence});
  } else if (!is_over && !answer.empty()) {
    const auto [what, rest] = first_line(answer);
    const auto [where, others] = first_line(rest);
    const auto [before, more] = first_line(others);
    add(rank, {std::string(what.substr(0, kMostBytes)), std::string(where.substr(0, kMostBytes)),
               std::string(before.substr(0, kMostBytes))});
  }
  unanswered_.erase(look);
  return true;
}

void Looks::add(int rank, Finding finding) {
  auto& found = found_[rank];
  if (found.size() == kMost) found.pop_front();
  found.push_back(std::move(finding));
}

std::string Looks::describe(int rank, std::chrono::nanoseconds wait) const {
  struct Tally {
    const Finding* last = nullptr;
    int times = 0;
  };
  const auto found = found_.find(rank);
  if (found == found_.end()) return "";
  std::map<std::string, Tally> by_what;
  std::map<std::string, int> by_before;
  for (const Finding& finding : found->second) {
    Tally& tally = by_what[finding.what];
    tally.last = &finding;
    ++tally.times;
    if (!finding.before.empty()) ++by_before[finding.before];
  }
  std::vector<Tally> tallies;
  for (const auto& [what, tally] : by_what) tallies.push_back(tally);
  std::ranges::stable_sort(tallies, std::ranges::greater(), &Tally::times);
  std::string text;
  for (const Tally& tally : tallies) {
    if (!text.empty()) text += ", ";
    text += tally.last->what + " in " + std::to_string(tally.times);
    if (&tally == tallies.data()) text += " of " + std::to_string(found->second.size()) + " looks";
    const auto part = wait * tally.times / static_cast<std::int64_t>(found->second.size());
    const auto ms = std::chrono::round<milliseconds>(part).count();
    if (ms > 0) text += ", or " + std::to_string(ms) + " ms";
    if (!tally.last->where.empty()) text += " (at last " + tally.last->where + ")";
  }
  if (by_before.empty()) return text;
  const auto& [before, times] =
      *std::ranges::max_element(by_before, {}, [](const auto& each) { return each.second; });
  return text + "; in " + std::to_string(times) + " of them before " + before;
}

}  // namespace torch_ring
