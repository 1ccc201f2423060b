#include "engine/lateness.h"

#include <algorithm>

#include "core/at.h"

namespace torch_ring {

std::optional<std::string> Lateness::note_notable(int last, std::chrono::nanoseconds lag,
                                                  Clock::time_point now) {
  std::optional<std::string> summary;
  if (!begin_) begin_ = now;
  if (now - *begin_ >= kPeriod) {
    summary = sum_up();
    for (auto& waits : waits_) waits.clear();
    begin_ = now;
  }
  if (last >= 0 && last != rank_) at(waits_, last).push_back(lag);
  return summary;
}

/// What this rank has to say of the period.
std::optional<std::string> Lateness::sum_up() const {
  std::size_t all = 0;
  for (const auto& waits : waits_) all += waits.size();
  const auto most =
      std::ranges::max_element(waits_, {}, &std::vector<std::chrono::nanoseconds>::size);
  const auto late = static_cast<int>(most - waits_.begin());
  if (all < kFewest || 2 * most->size() <= all || rank_ != (late == 0 ? 1 : 0)) return std::nullopt;
  std::vector<std::chrono::nanoseconds> lags = *most;
  const auto middle = lags.begin() + static_cast<std::ptrdiff_t>(lags.size() / 2);
  std::ranges::nth_element(lags, middle);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(*middle).count();
  return "rank " + std::to_string(late) + " was last in " +
         std::to_string(100 * lags.size() / all) + " % of the " + std::to_string(all) +
         " agreements for which rank " + std::to_string(rank_) + " waited " +
         std::to_string(kNotable.count()) + " ms or more in the last minute, by " +
         std::to_string(ms) + " ms in the median (docs/tracing.md)";
}

}  // namespace torch_ring
