// SPDX-License-Identifier: Apache-2.0
#include "engine/driver.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "core/at.h"
#include "core/failpoint.h"
#include "engine/agreement.h"
#include "engine/entry.h"
#include "engine/request.h"

namespace torch_ring {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A waiting caller's spin. The engine's thread spins only for kSpin, as it may take the core from a
// thread that computes. A waiting caller has nothing else to do on its core, and ranks with equal
// work differ by some hundred microseconds.
constexpr microseconds kBlockingSpin{500};

// A rank that has waited for so long with nothing new tells the others. So ranks that wait for
// different things report the mismatch within a second.
constexpr milliseconds kBlockedAfter{200};

// How long after its own timeout a set waits for another one, whose error is the cause.
constexpr milliseconds kGrace{1000};

// A shorter wait needs no last rank.
constexpr milliseconds kNotableLag{1};

/// A wait in microseconds, for a Post.
std::uint32_t waited_us(Clock::duration wait) {
  const auto us = std::chrono::duration_cast<microseconds>(wait).count();
  return static_cast<std::uint32_t>(std::min<decltype(us)>(us, LeastWait::kNone - 1));
}

/// Tells this rank's join that the others have entered a pass, if `entered` is one. They run ahead
/// there, so nothing else tells this rank to take part in a launch.
void tell_of_pass(const auto& pending, const Fingerprint& entered) {
  const auto join = pending.find(kJoinKey);
  const auto pass = static_cast<std::int64_t>(planned_pass(entered.name).value_or(0));
  if (pass > 0 && join != pending.end()) join->second.work->request().allocate({&pass, 1});
}

}  // namespace

Driver::Driver(HostCommunicator& communicator, const Abort& abort, Watchdog& watchdog,
               RequestQueue& queue, Callbacks& callbacks, Options options)
    : communicator_(communicator),
      board_(communicator.board()),
      abort_(abort),
      watchdog_(watchdog),
      queue_(queue),
      callbacks_(callbacks),
      config_(options.config),
      labels_(std::move(options.labels)),
      waits_(std::move(options.waits)),
      log_(std::move(options.log)),
      others_may_submit_(std::move(options.others_may_submit)),
      launch_order_(options.launch_order ? std::move(options.launch_order)
                                         : std::make_shared<LaunchOrder>()),
      set_(options.set),
      agreement_(labels_, config_.words),
      executor_(communicator, host_buffers_, config_.fusion_threshold_bytes),
      device_(std::move(options.make_device), config_.fusion_threshold_bytes, abort,
              config_.transfer_timeout()),
      lateness_(communicator.rank(), communicator.size()),
      wait_(waits_.get()),
      progress_(labels_.size()) {}

void Driver::make_progress(const Work* target, const Interrupt& interrupt) {
  std::optional<Clock::time_point> since;  // the beginning of this wait
  bool blocked = false;
  bool announced_blocked = false;
  while (target == nullptr || !target->done()) {
    if (queue_.has_works()) take_submitted(queue_.lock());
    blocked = blocked && outbox_.empty();
    if (round_open_ && board_.complete()) {
      finish_round();  // a complete round counts, even if one of the ranks has died since
      continue;
    }
    abort_.check();
    if (!round_open_) {
      const bool announces = !outbox_.empty() ||
                             (blocked && !announced_blocked && !pending_.empty()) ||
                             (!pending_.empty() && board_.peer_posted());
      if (announces) {
        announced_blocked = blocked;
        announce_outbox(blocked);
        continue;
      }
      if (target == nullptr && pending_.empty()) return;
    }
    if (target == nullptr && callbacks_.should_yield()) return;
    auto now = Clock::now();
    if (!since) since = now;
    if (round_open_ && !waits_since_) waits_since_ = now;
    const bool is_patient = target != nullptr && now - *since < kBlockingSpin;
    board_.wait_until(now + kPollInterval, is_patient ? kBlockingSpin : kSpin);
    // While rounds go on, the checks below can wait.
    if (now - last_check_ < kPollInterval && round_is_complete()) continue;
    last_check_ = now = Clock::now();
    check_stalls();
    if (round_open_) wait_.lasts(now, [&] { return board_.missing(); });
    blocked = target != nullptr && is_blocked(now - std::max(*since, last_submission_));
    // The engine must know during long waits, too: close() waits for the device.
    poll_device();
    callbacks_.pause(interrupt);
  }
}

/// Whether this rank, which has waited and submitted nothing for so long, will probably submit
/// nothing else.
bool Driver::is_blocked(Clock::duration waited) {
  if (waited < kBlockedAfter || !outbox_.empty()) return false;
  if (waited >= config_.grace_before_timeout()) return true;
  const bool several = queue_.has_several_submitters(queue_.lock());
  return !several && !(others_may_submit_ && others_may_submit_());  // unlocked: may block
}

/// Posts an entry with as much of the outbox as fits, maybe nothing.
void Driver::announce_outbox(bool blocked) {
  entry_.clear(blocked, launch_order_->is_shared());
  const bool alone = outbox_.size() == 1;
  while (!outbox_.empty()) {
    Work& work = *outbox_.front();
    const Request& request = work.request();
    Announcement announcement = announce(request, alone, communicator_, fingerprint_);
    announcement.launches = work.launches_;
    announcement.among_threads = work.among_threads_;
    const std::size_t needed = EntryWriter::bytes_needed(announcement);
    // An announcement that is alone in its entry may be longer, since all ranks usually post the
    // same one.
    const bool fits = entry_.bytes() + needed <= board_.safe_capacity();
    if (!fits && entry_.count() > 0) break;  // the rest goes into the next round
    if (!fits && entry_.bytes() + needed > board_.capacity()) {
      throw Error(ErrorKind::kInternal, request.fingerprint.describe() + " does not fit an entry");
    }
    entry_.append(announcement);
    last_submission_ = work.submitted_;
    work.times_.round.store(round_number(), std::memory_order_relaxed);
    if (spare_) {
      spare_.key() = work.key_;
      spare_.mapped() = {std::move(outbox_.front())};
      pending_.insert(std::move(spare_));
    } else {
      pending_.emplace(work.key_, Pending{std::move(outbox_.front())});
    }
    outbox_.pop_front();
  }
  Post post = entry_.post();
  post.waited_us = answered_ ? LeastWait::kNone : waited_us(lag_);
  post.most_us = std::exchange(notable_us_, 0);
  answered_ = entry_.count() == 0;
  board_.post(post);
  round_open_ = true;
}

/// Runs a complete round.
void Driver::finish_round() {
  round_open_ = false;
  wait_.end();
  agreed_ = Clock::now();
  const Round round = board_.round();
  settle(round);
  lag_ = waits_since_ ? agreed_ - *waits_since_ : Clock::duration::zero();
  if (lag_ >= Lateness::kNotable) notable_us_ = waited_us(lag_);
  waits_since_.reset();
  watchdog_.begin_data(round_number());
  run_round(round);
  watchdog_.end_data();
  if (!pending_.empty()) idle_since_ = Clock::now();
  round_number_.store(round_number() + 1, std::memory_order_relaxed);
}

/// Records the rank that this one and the others waited for in the round before `round`.
void Driver::settle(const Round& round) {
  const int last = round.last_of_previous;
  if (round.most_us > 0) {
    const int late = last_of(awaited_.candidates, last);
    const auto summary = lateness_.note(awaited_.lag > lag_ && late >= 0 ? late : last,
                                        microseconds(round.most_us), agreed_);
    if (summary && log_) log_(*summary);
    awaited_ = {};
  }
  if (unsettled_.empty()) return;
  const Lock lock = queue_.lock();
  for (const auto& [number, candidates] : unsettled_) {
    if (const int late = last_of(candidates, last); late >= 0) {
      queue_.recorder(lock).settle(number, late);
    }
  }
  unsettled_.clear();
}

/// Records the agreement on the next operation, which is this rank's work.
void Driver::write_down(Work& work, const Decision& decision) {
  OperationTimes& times = work.times_;
  // An operation that this rank announced in an earlier round has waited since then, except while
  // data moved.
  const bool waited = times.round.load(std::memory_order_relaxed) != round_number();
  const std::chrono::nanoseconds lag = waited ? agreed_ - idle_since_ : lag_;
  times.agreed.store(agreed_, std::memory_order_relaxed);
  times.sequence.store(decided_, std::memory_order_relaxed);
  if (work.request_.sequence != nullptr) *work.request_.sequence = decided_;
  times.round.store(round_number(), std::memory_order_relaxed);
  times.lag.store(lag, std::memory_order_relaxed);
  // Only a rank that announced it in this round can have been last.
  if (waited && lag >= Lateness::kNotable && !decision.last.empty()) {
    awaited_ = {lag, decision.last};
    notable_us_ = std::max(notable_us_, waited_us(lag));
  }
  if (decision.last.size() == 1) {
    times.last_rank.store(decision.last.front(), std::memory_order_relaxed);
  } else if (lag >= kNotableLag) {
    unsettled_.emplace_back(work.number_, decision.last);
  }
  times.is_inline.store(decision.is_inline, std::memory_order_relaxed);
}

/// Runs the requests that every rank has announced by now, and fails mismatches.
void Driver::run_round(const Round& round) {
  const bool others_wait = !outbox_.empty() || queue_.has_works();  // to be announced
  if (others_wait) note_progress(round, Clock::now());
  if (run_unanimous(round)) return;
  std::vector<Decision> decisions = agreement_.round(round);
  if (!agreement_.empty() && !others_wait) note_progress(round, Clock::now());

  Batch here;
  std::vector<const Decision*> on_device;
  const bool has_joined = pending_.contains(kJoinKey);
  for (Decision& decision : decisions) {
    const auto mine = pending_.find(decision.key);
    ++decided_;
    if (mine != pending_.end() && !decision.mismatch) {
      const Request& request = mine->second.work->request();
      if (request.fingerprint.collective == Collective::kAlltoall && decision.rows.empty()) {
        decision.rows = gather_rows(request, communicator_);
        decision.mismatch = misfit_of(request.fingerprint, decision.rows, communicator_.size(),
                                      [&](int rank) { return name_in(at(labels_, rank)); });
      }
    }
    if (mine != pending_.end()) write_down(*mine->second.work, decision);
    if (decision.resets_numbering) reset_numbering();
    for (const std::string& group : decision.ended_groups) end_group(group, *decision.mismatch);
    if (mine == pending_.end() && decision.for_joined) tell_of_pass(pending_, *decision.for_joined);
    if (decision.mismatch) {
      if (mine != pending_.end()) fail(mine, *decision.mismatch);
    } else if (fingerprint_of(decision).on_host()) {
      add(here, decision, host_buffers_);
    } else {
      on_device.push_back(&decision);
    }
  }
  if (has_joined) check_place(on_device);
  executor_.run(here.jobs, [&](std::size_t i) {
    if (const auto& work = here.works[i]) {
      complete(*work);
      pending_.erase(work->key_);
    }
  });
  if (!on_device.empty()) run_on_device(round, on_device);
}

/// On a rank that has joined: throws if the others have called a decided work inside a pass, after
/// launches that this rank makes only when it hears of the pass.
void Driver::check_place(std::span<const Decision* const> decisions) {
  const std::uint32_t launches = queue_.launches(queue_.lock());
  for (const Decision* const decision : decisions) {
    if (decision->launches == launches) continue;
    throw Error(ErrorKind::kInternal,
                fingerprint_of(*decision).describe() +
                    ": it was called during a backward pass whose hosts run ahead, while this rank "
                    "has joined: call it after backward(), or wrap the optimizer with "
                    "run_ahead=False");
  }
}

/// Runs the decided works on a device, in this set's turn if a rank has several sets that use its
/// devices. The set's communicator there is made in a turn, too.
void Driver::run_on_device(const Round& round, std::span<const Decision* const> decisions) {
  const bool is_ordered = std::ranges::any_of(
      round.runs, [](const Run& run) { return EntryReader(run.common, run.own).shares_device(); });
  std::optional<LaunchOrder::Place> place;
  if (is_ordered) {
    place.emplace(*launch_order_, set_, set_name(labels_, config_.words.members));
    place->settle(communicator_);
    place->wait(abort_, config_.transfer_timeout() + kGrace);
  }
  Batch batch;
  for (const Decision* const decision : decisions) {
    const std::uint8_t type = fingerprint_of(*decision).device;
    if (const std::optional<Error>& error = device_.prepare(type, communicator_, abort_)) {
      const auto mine = pending_.find(decision->key);
      if (mine != pending_.end()) fail(mine, *error);
    } else {
      const DeviceGate::Pass pass = device_.enter_or_throw();
      add(batch, *decision, device_.buffers());
    }
  }
  if (batch.jobs.empty()) return;
  callbacks_.set_device_busy(true);  // before a work is done: close() waits for the device
  device_.run(
      batch.jobs,
      [&](std::size_t i) {
        if (const auto& work = batch.works[i]) finish(*work);
      },
      [&](std::size_t i) {
        if (const auto& work = batch.works[i]) {
          if (!work->failed()) end(*work);
          pending_.erase(work->key_);
        }
      });
}

/// The fingerprint of a decision without a mismatch: this rank has announced it, or has joined.
const Fingerprint& Driver::fingerprint_of(const Decision& decision) const {
  const auto mine = pending_.find(decision.key);
  return mine == pending_.end() ? decision.for_joined.value()
                                : mine->second.work->request().fingerprint;
}

/// Adds this rank's work for a decision, or a stand-in in `buffers`.
void Driver::add(Batch& batch, const Decision& decision, Buffers& buffers) {
  if (const auto mine = pending_.find(decision.key); mine != pending_.end()) {
    batch.works.push_back(mine->second.work);
    Work& work = *mine->second.work;
    batch.jobs.push_back({&work.request(), &decision, &work.times_});
  } else {
    batch.works.push_back(nullptr);
    batch.stand_ins.emplace_back(*decision.for_joined, buffers);
    batch.jobs.push_back({&batch.stand_ins.back().request, &decision});
  }
}

/// Runs the usual round: nothing was pending, and all ranks have announced the same one request.
/// Returns false for other rounds.
bool Driver::run_unanimous(const Round& round) {
  if (pending_.size() != 1 || !agreement_.empty()) return false;
  Work& work = *pending_.begin()->second.work;
  const Fingerprint& fingerprint = work.request().fingerprint;
  if (!fingerprint.on_host()) return false;
  const auto decision = Agreement::unanimous(fingerprint, round);
  if (!decision) return false;
  if (decision->resets_numbering) reset_numbering();
  ++decided_;
  write_down(work, *decision);
  const Job job{&work.request(), &*decision, &work.times_};
  executor_.run({&job, 1}, [&](std::size_t) { complete(work); });
  spare_ = pending_.extract(pending_.begin());
  spare_.mapped() = {};
  return true;
}

/// Begins to number requests anew: all ranks wait for the same thing.
void Driver::reset_numbering() { queue_.reset_numbering(queue_.lock()); }

void Driver::complete(Work& work) {
  if (finish(work)) end(work);
}

/// Calls the request's finish(). Its exception fails the work; returns whether there was none.
bool Driver::finish(Work& work) {
  failpoint("collective", communicator_.rank());
  try {
    if (work.request_.finish) work.request_.finish();
  } catch (const std::exception& error) {  // the data have moved: the ranks are in step
    fail(work, Error(ErrorKind::kInvalidArgument,
                     std::string("the result cannot be written: ") + error.what()));
    return false;
  }
  return true;
}

void Driver::end(Work& work) {
  release_tensors(work);
  const Lock lock = queue_.lock();
  queue_.complete(lock, work);
  callbacks_.completed(lock);
}

void Driver::fail(std::map<std::string, Pending>::iterator pending, const Error& cause) {
  fail(*pending->second.work, cause);
  pending_.erase(pending);
}

void Driver::fail(Work& work, const Error& cause) {
  release_tensors(work);
  const Lock lock = queue_.lock();
  queue_.fail(lock, work, cause);
  callbacks_.completed(lock);
}

/// Fails the members of a group that are not announced yet, because the ranks disagree about the
/// group.
void Driver::end_group(const std::string& group, const Error& cause) {
  const auto rest = std::ranges::stable_partition(
      outbox_, [&](const auto& work) { return group_of(work->request().fingerprint) != group; });
  for (const auto& work : rest) fail(*work, cause);
  outbox_.erase(rest.begin(), rest.end());
}

/// Releases the tensors that the request's functions hold: they may belong to a device's stream,
/// which this thread uses.
void Driver::release_tensors(Work& work) { work.request_.begin = work.request_.finish = nullptr; }

void Driver::isolate_buffers() noexcept {
  if (!communicator_.has_shared_memory()) return;
  for (const auto& [key, pending] : pending_) {
    const Request& request = pending.work->request();
    if (shared_offset(request, communicator_) >= 0) {
      communicator_.isolate(request.output, request.input_bytes());
    }
  }
}

void Driver::fail_all(const Lock& lock, const Error& cause) {
  take_submitted(lock);
  for (const auto& work : outbox_) queue_.fail(lock, *work, cause);
  for (const auto& [key, pending] : pending_) queue_.fail(lock, *pending.work, cause);
  outbox_.clear();
  pending_.clear();
  wait_.fail();
}

/// Records the ranks that announce something in a round that leaves requests undecided.
void Driver::note_progress(const Round& round, Clock::time_point now) {
  for (const Run& run : round.runs) {
    if (EntryReader(run.common, run.own).left() == 0) continue;
    std::fill_n(progress_.begin() + run.first, run.count, now);
  }
}

namespace {

using std::chrono::milliseconds;

// Tenths of a second: enough for a message.
milliseconds rounded(Clock::duration duration) {
  return std::chrono::floor<std::chrono::duration<std::int64_t, std::deci>>(duration);
}

/// All ranks but the `unready` ones, at most kMost by name: "rank 0, rank 2 and 5 more".
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

/// Logs warnings for works that this rank waits for long, and throws if it has waited too long, or
/// if a rank has left.
void Driver::check_stalls() {
  if (pending_.empty() || round_is_complete()) return;
  watchdog_.check_departures(round_number());
  const auto now = Clock::now();
  const auto is_over = [](Clock::duration waited, milliseconds limit) {
    return limit.count() > 0 && waited > limit;
  };
  std::map<std::vector<int>, std::vector<Pending*>> stalled;  // by the late ranks
  for (auto& [key, pending] : pending_) {
    const Work& work = *pending.work;
    const auto waited = now - work.submitted_;
    const auto timeout = work.request().timeout.value_or(config_.timeout);
    if (is_over(waited, timeout) && is_over(now - last_progress(work), timeout)) {
      throw Error(ErrorKind::kTimeout, work.request().fingerprint.describe() + ": gave up after " +
                                           timeout_text(work.request()) + ": " +
                                           describe(late_ranks(work)));
    }
    // A rank that has joined waits as long as the others make progress.
    const bool joined = work.request().fingerprint.collective == Collective::kJoin;
    const auto since = std::max(joined ? last_progress(work) : work.submitted_, pending.warned);
    if (is_over(now - since, config_.stall_warning)) {
      stalled[late_ranks(work)].push_back(&pending);
    }
  }
  for (const auto& [late, works] : stalled) warn(works, now);
}

/// Logs one warning for works that wait for the same ranks, with the name of the first work.
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

/// Asks late ranks for their operations; the answers are logged. One rank asks for all, and only a
/// few ranks.
void Driver::ask(std::span<const int> late) {
  constexpr std::size_t kMost = 4;
  int first = 0;
  while (std::ranges::find(late, first) != late.end()) ++first;
  if (waits_ && first == communicator_.rank())
    waits_->ask(late.first(std::min(late.size(), kMost)));
}

/// How long this rank waits for late ones, for errors.
std::string Driver::timeout_text(const Request& request) const {
  return request.timeout ? in_seconds(*request.timeout) + " (the timeout of this operation)"
                         : config_.timeout_text();
}

/// When `work` was submitted, or, if later, the last announcement of the rank, among those that it
/// waits for, that has been silent for longest.
Clock::time_point Driver::last_progress(const Work& work) const {
  auto oldest = Clock::time_point::max();
  for (const int rank : late_ranks(work)) oldest = std::min(oldest, at(progress_, rank));
  if (oldest == Clock::time_point::max()) oldest = {};
  return std::max(work.submitted_, oldest);
}

/// The ranks that have not announced `work`, as far as this rank can know.
std::vector<int> Driver::late_ranks(const Work& work) const {
  std::vector<int> silent;  // the ranks missing from the round
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
