// SPDX-License-Identifier: Apache-2.0
#include "engine/watchdog.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/at.h"
#include "core/connection_lost.h"
#include "engine/request.h"

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
  if (last >= 0) at(waits_, last).push_back(lag);
  return summary;
}

/// The line of the period, if it has one.
std::optional<std::string> Lateness::sum_up() const {
  std::size_t all = 0;
  for (const auto& waits : waits_) all += waits.size();
  const auto most =
      std::ranges::max_element(waits_, {}, &std::vector<std::chrono::nanoseconds>::size);
  if (all < kFewest || 2 * most->size() <= all) return std::nullopt;
  std::vector<std::chrono::nanoseconds> lags = *most;
  const auto middle = lags.begin() + static_cast<std::ptrdiff_t>(lags.size() / 2);
  std::ranges::nth_element(lags, middle);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(*middle).count();
  return "rank " + std::to_string(most - waits_.begin()) + " was last in " +
         std::to_string(100 * lags.size() / all) + " % of the " + std::to_string(all) +
         " agreements for which a rank waited " + std::to_string(kNotable.count()) +
         " ms or more in the last minute, by " + std::to_string(ms) +
         " ms in the median (docs/tracing.md)";
}

int last_of(const std::vector<int>& candidates, int last) {
  if (candidates.size() == 1) return candidates.front();
  const bool is_one = candidates.empty() || std::ranges::find(candidates, last) != candidates.end();
  return is_one ? last : -1;
}

namespace {

// A departure becomes an error only after this time: the gradients of a pass are submitted one by
// one, and the error should be that of the wait for all of them. Only the text depends on it.
constexpr std::chrono::milliseconds kDepartureGrace{250};

// The cause of a lost connection to a silent rank arrives within this time, even over a lossy
// network.
constexpr std::chrono::seconds kCauseGrace{5};

// The wait for the last posts of a departed rank, if no remaining rank knows their number.
constexpr std::chrono::seconds kUnknownGrace{30};

}  // namespace

Watchdog::Watchdog(ControlPlane* plane, std::uint64_t set, std::vector<int> members,
                   std::vector<std::string> labels, std::string leave, Abort& abort,
                   std::function<void()> raised)
    : plane_(plane),
      set_(set),
      members_(std::move(members)),
      labels_(std::move(labels)),
      leave_(std::move(leave)),
      abort_(abort),
      raised_(std::move(raised)) {
  // The last statement: the plane may call this object from here on.
  if (plane_ != nullptr) plane_->subscribe(set_, members_, *this);
}

void Watchdog::stop() {
  if (plane_ != nullptr) plane_->unsubscribe(set_);
  plane_ = nullptr;
}

void Watchdog::announce(const Error& cause) {
  if (plane_ != nullptr) plane_->fail(set_, cause);
}

void Watchdog::leave(std::uint64_t rounds, std::string why) {
  if (plane_ == nullptr) return;
  plane_->leave(set_, rounds, static_cast<int>(members_.size()), std::move(why));
}

void Watchdog::check_departures(std::uint64_t round) const {
  if (!any_departed_.load(std::memory_order_seq_cst)) return;
  if (const auto cause = departure_before(round, kDepartureGrace)) throw Error(*cause);
}

void Watchdog::begin_data(std::uint64_t round) {
  moving_.store(round, std::memory_order_seq_cst);
  if (!any_departed_.load(std::memory_order_seq_cst)) return;
  if (const auto cause = departure_before(round, {})) throw Error(*cause);
}

Watchdog::Cause Watchdog::root_cause(const Error& error, std::uint64_t round) const {
  if (error.kind() != ErrorKind::kPeerLost) return {error, false};
  const auto deadline = Clock::now() + kCauseGrace;
  const auto* const lost = dynamic_cast<const ConnectionLost*>(&error);
  const auto probe = lost && plane_ ? plane_->probe(at(members_, lost->rank())) : 0;
  while (true) {
    // Before the search for a cause, which then finds one that the rank told before it answered.
    const bool has_answered = probe != 0 && plane_->has_answered(probe);
    if (auto cause = departure_before(round, kDepartureGrace)) return {std::move(*cause), true};
    if (abort_.raised() || Clock::now() >= deadline) return {error, false};
    if (has_answered && !departure_before(round, {})) return {cut_by_network(error), false};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Watchdog::on_lost(int, const std::string& how) {
  if (abort_.raise(Error(ErrorKind::kPeerLost, how))) raised_();
}

void Watchdog::on_departed(int rank, std::optional<std::uint64_t> rounds, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    const auto known = std::ranges::find(departures_, rank, &Departure::rank);
    if (known == departures_.end()) {
      departures_.push_back({rank, rounds, why, Clock::now()});
    } else if (!known->rounds) {
      known->rounds = rounds;
      known->why = why;
    }
  }
  any_departed_.store(true, std::memory_order_seq_cst);
  const auto moving = moving_.load(std::memory_order_seq_cst);
  if (moving != 0) {
    if (const auto cause = departure_before(moving, {})) abort_.raise(*cause);
  }
  raised_();
}

void Watchdog::on_failed(int rank, ErrorKind kind, const std::string& why) {
  const ErrorKind here = kind == ErrorKind::kTimeout ? kind : ErrorKind::kPeerLost;
  if (abort_.raise(Error(here, label(rank) + " failed: " + why))) raised_();
}

void Watchdog::on_connected() { raised_(); }

/// The error of a wait in `round`, if a rank left before that round, at least `grace` ago.
std::optional<Error> Watchdog::departure_before(std::uint64_t round, Clock::duration grace) const {
  const std::scoped_lock lock(mutex_);
  for (const Departure& departure : departures_) {
    if (departure.rounds && *departure.rounds >= round) continue;
    const Clock::duration patience = departure.rounds ? grace : Clock::duration(kUnknownGrace);
    if (Clock::now() - departure.since >= patience) return departed(departure);
  }
  return std::nullopt;
}

Error Watchdog::departed(const Departure& departure) const {
  const std::string& who = label(departure.rank);
  if (!departure.why.empty()) return {ErrorKind::kPeerLost, who + " left: " + departure.why};
  return {ErrorKind::kPeerLost,
          who + " has left: it called " + leave_ + " or exited. " + kAllRanksMustCall};
}

const std::string& Watchdog::label(int rank) const {
  const auto member = std::find(members_.begin(), members_.end(), rank);
  return at(labels_, member - members_.begin());
}

}  // namespace torch_ring
