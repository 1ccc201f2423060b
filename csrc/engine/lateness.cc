#include "engine/lateness.h"

#include <algorithm>
#include <numeric>

#include "core/at.h"

namespace torch_ring {

std::optional<Lateness::Summary> Lateness::note_notable(int last, std::chrono::nanoseconds lag,
                                                        Clock::time_point now) {
  std::optional<Summary> summary;
  if (!begin_) begin_ = now;
  if (now - *begin_ >= kPeriod) {
    summary = sum_up();
    suspect_ = now - *begin_ < 2 * kPeriod ? waited_for_most() : std::nullopt;
    for (auto& waits : waits_) waits.clear();
    std::ranges::fill(waited_, std::chrono::nanoseconds{});
    begin_ = now;
    looks_left_ = kLooks;
  }
  if (last >= 0 && last != rank_) {
    at(waits_, last).push_back(lag);
    at(waited_, last) += lag;
  }
  if (all() >= kFewestToLook) suspect_ = waited_for_most();  // else that of the period before
  return summary;
}

/// The number of notable waits in this period.
std::size_t Lateness::all() const {
  std::size_t all = 0;
  for (const auto& waits : waits_) all += waits.size();
  return all;
}

/// The rank that was last in most of the waits, if it is this rank that speaks of it.
std::optional<int> Lateness::last_in_most() const {
  const auto most =
      std::ranges::max_element(waits_, {}, [](const auto& waits) { return waits.size(); });
  if (2 * most->size() <= all()) return std::nullopt;
  return if_spoken_of(static_cast<int>(most - waits_.begin()));
}

/// The rank that most of the time of the waits was for, if it is this rank that speaks of it. On a
/// busy machine many short waits are for others.
std::optional<int> Lateness::waited_for_most() const {
  const auto most = std::ranges::max_element(waited_);
  const auto all = std::accumulate(waited_.begin(), waited_.end(), std::chrono::nanoseconds{});
  if (2 * *most <= all) return std::nullopt;
  return if_spoken_of(static_cast<int>(most - waited_.begin()));
}

std::optional<int> Lateness::if_spoken_of(int late) const {
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
  return Summary{*late, "rank " + std::to_string(*late) + " was last in " +
                            std::to_string(100 * lags.size() / all()) + " % of the " +
                            std::to_string(all()) + " agreements for which rank " +
                            std::to_string(rank_) + " waited " + std::to_string(kNotable.count()) +
                            " ms or more in the last minute, by " + std::to_string(ms) +
                            " ms in the median (docs/tracing.md)"};
}

}  // namespace torch_ring
