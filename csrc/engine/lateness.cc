#include "engine/lateness.h"

#include <algorithm>
#include <numbers>
#include <numeric>
#include <utility>

#include "core/at.h"

namespace torch_ring {

namespace {

std::chrono::nanoseconds sum(const std::vector<std::chrono::nanoseconds>& waits) {
  return std::accumulate(waits.begin(), waits.end(), std::chrono::nanoseconds{});
}

}  // namespace

std::optional<Lateness::Summary> Lateness::note_notable(int last, std::chrono::nanoseconds lag,
                                                        Clock::time_point now) {
  std::optional<Summary> summary;
  const std::optional<int> suspect_before = suspect_;
  if (!begin_) begin_ = now;
  if (now - *begin_ >= kPeriod) {
    summary = sum_up();
    suspect_ = now - *begin_ < 2 * kPeriod ? waited_for_most() : std::nullopt;
    for (auto& waits : waits_) waits.clear();
    begin_ = now;
    looks_left_ = kLooks;
  }
  if (last >= 0 && last != rank_) at(waits_, last).push_back(lag);
  if (all() >= kFewestToLook) suspect_ = waited_for_most();  // else that of the period before
  if (suspect_) plan_looks(suspect_before);
  return summary;
}

/// Sets how far apart looks are in the sum of the suspect's waits, and leaves out those for which
/// it is too late. The golden ratio spreads them evenly over waits of equal length, too.
void Lateness::plan_looks(std::optional<int> suspect_before) {
  const auto& waits = at(waits_, *suspect_);
  const Clock::duration before = std::exchange(waited_, sum(waits));
  if (waits.empty()) {  // it was late in the period before
    next_look_ = std::max<Clock::duration>(kNotable, distance_ / 3);
    return;
  }
  distance_ = std::chrono::duration_cast<Clock::duration>(waited_ * std::numbers::phi /
                                                          static_cast<double>(waits.size()));
  if (suspect_ != suspect_before || waited_ < before) next_look_ = waited_ + distance_ / 3;
  while (look_after() < kNotable) next_look_ += distance_;
}

/// The number of notable waits in this period.
std::size_t Lateness::all() const {
  std::size_t all = 0;
  for (const auto& waits : waits_) all += waits.size();
  return all;
}

/// The rank that was last in most of the waits, if it is this rank that speaks of it.
std::optional<int> Lateness::last_in_most() const {
  return largest([](const auto& waits) { return static_cast<std::int64_t>(waits.size()); });
}

/// The rank that most of the time of the waits was for. On a busy machine many short waits are for
/// others.
std::optional<int> Lateness::waited_for_most() const {
  return largest([](const auto& waits) { return sum(waits).count(); });
}

/// The rank whose waits weigh more than those of all others, if it is this rank that speaks of it.
template <class Weight>
std::optional<int> Lateness::largest(Weight weight) const {
  std::int64_t all = 0;
  std::int64_t most = 0;
  int late = 0;
  for (std::size_t rank = 0; rank < waits_.size(); ++rank) {
    const std::int64_t own = weight(waits_[rank]);
    all += own;
    if (own > most) {
      most = own;
      late = static_cast<int>(rank);
    }
  }
  if (2 * most <= all) return std::nullopt;
  return rank_ == (late == 0 ? 1 : 0) ? std::optional(late) : std::nullopt;
}

/// What this rank has to say of the period.
std::optional<Lateness::Summary> Lateness::sum_up() const {
  const std::optional<int> late = last_in_most();
  if (!late || all() < kFewest) return std::nullopt;
  std::vector<std::chrono::nanoseconds> lags = at(waits_, *late);
  const auto middle = lags.begin() + static_cast<std::ptrdiff_t>(lags.size() / 2);
  std::ranges::nth_element(lags, middle);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(*middle).count();
  return Summary{*late, *middle,
                 "rank " + std::to_string(*late) + " was last in " +
                     std::to_string(100 * lags.size() / all()) + " % of the " +
                     std::to_string(all()) + " agreements for which rank " + std::to_string(rank_) +
                     " waited " + std::to_string(kNotable.count()) +
                     " ms or more in the last minute, by " + std::to_string(ms) +
                     " ms in the median (docs/tracing.md)"};
}

}  // namespace torch_ring
