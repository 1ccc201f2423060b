// Driver: which ranks are late, how long this rank bears with them, and what it says of it.
#include <algorithm>
#include <iterator>
#include <map>

#include "core/at.h"
#include "engine/driver.h"

namespace torch_ring {

namespace {

using std::chrono::milliseconds;

// Tenths of a second: enough for a message.
milliseconds rounded(Clock::duration duration) {
  return std::chrono::floor<std::chrono::duration<std::int64_t, std::deci>>(duration);
}

/// All ranks but `unready` ones, of many the first: "rank 0, rank 2 and 5 more".
std::string describe_ready(std::span<const std::string> labels, std::span<const int> unready) {
  constexpr std::size_t kMost = 16;
  std::string text;
  std::size_t count = 0;
  for (std::size_t rank = 0; rank < labels.size(); ++rank) {
    if (std::ranges::find(unready, static_cast<int>(rank)) != unready.end()) continue;
    if (++count <= kMost) text.append(text.empty() ? "" : ", ").append(name_in(labels[rank]));
  }
  return count > kMost ? text + " and " + std::to_string(count - kMost) + " more" : text;
}

}  // namespace

/// Warns of works for which this rank waits long, and throws if it has waited too long, or if a
/// rank has left.
void Driver::check_stalls() {
  if (pending_.empty() || round_is_complete()) return;
  watchdog_.check_departures(round_number());
  const auto now = Clock::now();
  const auto is_over = [](Clock::duration waited, milliseconds limit) {
    return limit.count() > 0 && waited > limit;
  };
  std::map<std::vector<int>, std::vector<Pending*>> stalled;  // by the ranks that are late
  for (auto& [key, pending] : pending_) {
    const Work& work = *pending.work;
    const auto waited = now - work.submitted_;
    const auto timeout = work.request().timeout.value_or(config_.timeout);
    if (is_over(waited, timeout) && is_over(now - last_progress(work), timeout)) {
      throw Error(ErrorKind::kTimeout, work.request().fingerprint.describe() + ": gave up after " +
                                           timeout_text(work.request()) + ": " +
                                           describe(late_ranks(work)));
    }
    // A rank that has joined waits as long as the others get on.
    const bool joined = work.request().fingerprint.collective == Collective::kJoin;
    const auto since = std::max(joined ? last_progress(work) : work.submitted_, pending.warned);
    if (is_over(now - since, config_.stall_warning)) {
      stalled[late_ranks(work)].push_back(&pending);
    }
  }
  for (const auto& [late, works] : stalled) warn(works, now);
}

/// Logs that works wait for the same ranks: the first of them by name.
void Driver::warn(std::span<Pending* const> stalled, Clock::time_point now) {
  for (Pending* const pending : stalled) pending->warned = now;
  const Work& work = *(*std::ranges::min_element(stalled, {}, [](const Pending* pending) {
                        return pending->work->submitted_;
                      }))->work;
  std::string text = name_in(at(labels_, communicator_.rank())) + " has waited " +
                     in_seconds(rounded(now - work.submitted_)) + " for " +
                     work.request().fingerprint.describe();
  if (stalled.size() > 1) text += " and " + std::to_string(stalled.size() - 1) + " more";
  std::vector<int> unready = late_ranks(work);
  text += ": " + describe(unready);
  if (round_open_) std::ranges::copy(board_.missing(), std::back_inserter(unready));
  text += ". Ready: " + describe_ready(labels_, unready) + ". It ";
  const bool fails = work.request().timeout.value_or(config_.timeout).count() > 0;
  text += fails ? "fails after " + timeout_text(work.request())
                : "goes on waiting: TORCH_RING_TIMEOUT is not set";
  log_(text);
  ask(late_ranks(work));
}

/// Asks late ranks what they do: the answers are logged. One rank asks for all, and not of many.
void Driver::ask(std::span<const int> late) {
  constexpr std::size_t kMost = 4;
  int first = 0;
  while (std::ranges::find(late, first) != late.end()) ++first;
  if (waits_ && first == communicator_.rank())
    waits_->ask(late.first(std::min(late.size(), kMost)));
}

/// How long this rank waits for late ones, as errors say it.
std::string Driver::timeout_text(const Request& request) const {
  return request.timeout ? in_seconds(*request.timeout) + " (the timeout of this operation)"
                         : config_.timeout_text();
}

/// When `work` was submitted, or when the ranks that it waits for last announced something: that
/// one of them whose last sign is the oldest.
Clock::time_point Driver::last_progress(const Work& work) const {
  auto oldest = Clock::time_point::max();
  for (const int rank : late_ranks(work)) oldest = std::min(oldest, at(progress_, rank));
  if (oldest == Clock::time_point::max()) oldest = {};
  return std::max(work.submitted_, oldest);
}

/// The ranks that have not announced `work`, as far as this rank can know.
std::vector<int> Driver::late_ranks(const Work& work) const {
  std::vector<int> silent;  // who keeps the round from being complete
  if (round_open_) {
    silent = board_.missing();
    if (waits_) silent = waits_->ends(silent);
  }
  std::ranges::sort(silent);
  const std::vector<int> missing = agreement_.missing(work.key_);  // sorted
  std::vector<int> both;  // the others may have announced it in the open round
  std::ranges::set_intersection(missing, silent, std::back_inserter(both));
  if (!both.empty()) return both;
  return missing.empty() ? silent : missing;
}

/// "rank 2 (pid 7) has not called it (it is computing, in no collective). All ranks must ..."
std::string Driver::describe(std::span<const int> late) const {
  const auto doing = [&](int rank) {
    const std::string instead = agreement_.waits_for(rank);
    return instead.empty() ? "computing, in no collective" : "in " + instead;
  };
  std::string text;
  for (const int rank : late) {
    text.append(text.empty() ? "" : ", ").append(at(labels_, rank));
    text.append(" has not called it (it is ").append(doing(rank)).append(")");
  }
  if (text.empty()) text = "a rank has not called it";
  return text + ". All ranks must call it, in the same order";
}

}  // namespace torch_ring
