#include "engine/driver.h"

#include <algorithm>
#include <list>

#include "core/at.h"
#include "core/failpoint.h"
#include "engine/announce.h"

namespace torch_ring {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A waiting caller's spin. The engine's thread spins for kSpin, as it may take the core from a
// thread that computes; a caller that waits has nothing else to do there, and ranks that compute
// the same differ by some hundred microseconds.
constexpr microseconds kBlockingSpin{500};

// A rank that has waited this long with nothing new tells the others, so that all ranks learn that
// they wait for different things: they report mismatches within a second.
constexpr milliseconds kBlockedAfter{200};

// Tenths of a second: enough for a message.
milliseconds rounded(Clock::duration duration) {
  return std::chrono::floor<std::chrono::duration<std::int64_t, std::deci>>(duration);
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
      log_(std::move(options.log)),
      agreement_(labels_),
      executor_(communicator, host_buffers_, config_.fusion_threshold_bytes),
      device_(std::move(options.make_device), config_.fusion_threshold_bytes) {}

void Driver::make_progress(const Work* target, const Interrupt& interrupt) {
  std::optional<Clock::time_point> since;  // the begin of this wait
  bool long_since = false;
  bool told_blocked = false;
  while (target == nullptr || !target->done()) {
    abort_.check();
    if (queue_.has_works()) take_submitted(queue_.lock());
    const bool blocked = long_since && outbox_.empty() && only_submitter();
    if (round_open_) {
      if (board_.complete()) {
        finish_round();
        continue;
      }
    } else if (!outbox_.empty() || (blocked && !told_blocked && !pending_.empty()) ||
               (!pending_.empty() && board_.peer_posted())) {
      told_blocked = blocked;
      announce_outbox(blocked);
      continue;
    } else if (target == nullptr && pending_.empty()) {
      return;
    }
    if (target == nullptr && callbacks_.should_yield()) return;
    auto now = Clock::now();
    if (!since) since = now;
    const bool is_patient = target != nullptr && now - *since < kBlockingSpin;
    board_.wait_until(now + kPollInterval, is_patient ? kBlockingSpin : kSpin);
    // While rounds go on, the checks below can wait.
    now = Clock::now();
    if (now - last_check_ < kPollInterval && round_is_complete()) continue;
    last_check_ = now;
    check_stalls();
    long_since = target != nullptr && now - *since > kBlockedAfter;
    // The engine must know while progress is made for long: close() waits for the device.
    if (device_.exists()) callbacks_.set_device_busy(device_.busy());
    callbacks_.pause(interrupt);
  }
}

/// Whether the thread that waits is the only one that could submit anything.
bool Driver::only_submitter() { return !queue_.has_several_submitters(queue_.lock()); }

/// Posts an entry with as much of the outbox as it can hold: maybe nothing.
void Driver::announce_outbox(bool blocked) {
  entry_.clear(blocked);
  const bool alone = outbox_.size() == 1;
  while (!outbox_.empty()) {
    Work& work = *outbox_.front();
    const Request& request = work.request();
    // From now on no round is unanimous, so each decision shows that the other ranks get on.
    if (request.fingerprint.collective == Collective::kJoin) last_decision_ = Clock::now();
    const Announcement announcement = announce(request, alone, communicator_, fingerprint_);
    const std::size_t needed = EntryWriter::bytes_needed(announcement);
    // One that is alone in its entry may be longer than the others: usually it is the same
    // everywhere.
    const bool fits = entry_.bytes() + needed <= board_.safe_capacity();
    if (!fits && entry_.count() > 0) break;  // the rest goes into the next round
    if (!fits && entry_.bytes() + needed > board_.capacity()) {
      throw Error(ErrorKind::kInternal, request.fingerprint.describe() + " does not fit an entry");
    }
    entry_.append(announcement);
    pending_.emplace(work.key_, Pending{std::move(outbox_.front())});
    outbox_.pop_front();
  }
  board_.post(entry_.post());
  round_open_ = true;
}

/// Runs a complete round.
void Driver::finish_round() {
  round_open_ = false;
  watchdog_.begin_data(rounds_ + 1);
  run_round();
  watchdog_.end_data();
  ++rounds_;
}

/// Runs the requests that every rank has announced by now, and fails mismatches.
void Driver::run_round() {
  const Round round = board_.round();
  if (run_unanimous(round)) return;
  const std::vector<Decision> decisions = agreement_.round(round);

  struct {
    std::vector<Job> jobs;
    std::vector<std::shared_ptr<Work>> works;  // null for a stand-in
  } here, on_device;
  std::list<StandIn> stand_ins;
  if (!decisions.empty()) last_decision_ = Clock::now();
  for (const Decision& decision : decisions) {
    const auto mine = pending_.find(decision.key);
    if (decision.resets_numbering) reset_numbering();
    if (mine == pending_.end() && !decision.for_joined) continue;  // other ranks' mismatch
    const Fingerprint& fingerprint =
        mine == pending_.end() ? *decision.for_joined : mine->second.work->request().fingerprint;
    std::optional<Error> error = decision.mismatch;
    if (!error && !fingerprint.on_host()) {
      error = device_.prepare(fingerprint.device, communicator_, abort_);
    }
    auto& [jobs, works] = fingerprint.on_host() ? here : on_device;
    if (error) {
      if (mine == pending_.end()) continue;
      fail(*mine->second.work, *error);
      pending_.erase(mine);
    } else if (mine != pending_.end()) {
      jobs.push_back({&mine->second.work->request(), &decision});
      works.push_back(mine->second.work);
    } else {
      Buffers& buffers = fingerprint.on_host() ? host_buffers_ : device_.buffers();
      jobs.push_back({&stand_ins.emplace_back(fingerprint, buffers).request, &decision});
      works.push_back(nullptr);
    }
  }
  const auto run = [&](auto& executor, auto& batch) {
    executor.run(batch.jobs, [&](std::size_t i) {
      if (!batch.works[i]) return;
      const std::string key = batch.works[i]->key_;
      complete(*batch.works[i]);
      pending_.erase(key);
    });
  };
  run(executor_, here);
  if (on_device.jobs.empty()) return;
  callbacks_.set_device_busy(true);  // before a work is done: close() waits for the device
  run(device_, on_device);
}

/// Runs the usual round: nothing was pending, and all ranks have announced the same one request.
/// Returns whether this round is one.
bool Driver::run_unanimous(const Round& round) {
  if (pending_.size() != 1 || !agreement_.empty()) return false;
  Work& work = *pending_.begin()->second.work;
  const Fingerprint& fingerprint = work.request().fingerprint;
  if (!fingerprint.on_host()) return false;
  const auto decision = Agreement::unanimous(fingerprint, round);
  if (!decision) return false;
  if (decision->resets_numbering) reset_numbering();
  const Job job{&work.request(), &*decision};
  executor_.run({&job, 1}, [&](std::size_t) { complete(work); });
  pending_.clear();
  return true;
}

/// Begins to number requests anew: all ranks wait for the same thing.
void Driver::reset_numbering() { queue_.reset_numbering(queue_.lock()); }

void Driver::complete(Work& work) {
  failpoint("collective", communicator_.rank());
  if (work.request_.finish) work.request_.finish();
  release_tensors(work);
  const Lock lock = queue_.lock();
  queue_.complete(lock, work);
  callbacks_.completed(lock);
}

void Driver::fail(Work& work, const Error& cause) {
  release_tensors(work);
  const Lock lock = queue_.lock();
  queue_.fail(lock, work, cause);
  callbacks_.completed(lock);
}

/// Releases what the request's functions hold: tensors may belong to a device's stream, and this
/// thread is the one that uses it.
void Driver::release_tensors(Work& work) { work.request_.begin = work.request_.finish = nullptr; }

void Driver::fail_all(const Lock& lock, const Error& cause) {
  take_submitted(lock);
  for (const auto& work : outbox_) queue_.fail(lock, *work, cause);
  for (const auto& [key, pending] : pending_) queue_.fail(lock, *pending.work, cause);
  outbox_.clear();
  pending_.clear();
}

/// Warns of works for which this rank waits long, and throws if it has waited too long, or if a
/// rank has left.
void Driver::check_stalls() {
  if (pending_.empty() || round_is_complete()) return;
  watchdog_.check_departures(rounds_ + 1);
  const auto now = Clock::now();
  for (auto& [key, pending] : pending_) {
    const Work& work = *pending.work;
    // A rank that has joined waits as long as the others get on.
    const bool joined = work.request().fingerprint.collective == Collective::kJoin;
    const auto age = now - (joined ? std::max(work.submitted_, last_decision_) : work.submitted_);
    if (age > config_.timeout) {
      throw Error(ErrorKind::kTimeout, work.request().fingerprint.describe() + ": gave up after " +
                                           in_seconds(config_.timeout) +
                                           " (TORCH_RING_TIMEOUT): " + late_ranks(work));
    }
    if (config_.stall_warning.count() > 0 && age > config_.stall_warning && !pending.warned) {
      pending.warned = true;
      log_(name_in(at(labels_, communicator_.rank())) + " has waited " + in_seconds(rounded(age)) +
           " for " + work.request().fingerprint.describe() + ": " + late_ranks(work) +
           ". It fails after " + in_seconds(config_.timeout) + " (TORCH_RING_TIMEOUT)");
    }
  }
}

/// "rank 2 (pid 7) has not called it (it is computing, in no collective). All ranks must ..."
std::string Driver::late_ranks(const Work& work) const {
  const auto doing = [&](int rank) {
    const std::string instead = agreement_.waits_for(rank);
    return instead.empty() ? "computing, in no collective" : "in " + instead;
  };
  std::string text;
  for (const int rank : agreement_.missing(work.key_)) {
    text.append(text.empty() ? "" : ", ").append(at(labels_, rank));
    text.append(" has not called it (it is ").append(doing(rank)).append(")");
  }
  if (text.empty() && round_open_) {
    // Who has not posted yet; between hosts also ranks whose entries wait behind a late one.
    const std::vector<int> late = board_.missing();
    for (const int rank : late) text.append(text.empty() ? "" : ", ").append(at(labels_, rank));
    if (late.size() > 1) text = "at least one of " + text;
    if (!late.empty()) text += " has not called it (it is " + doing(late.front()) + ")";
  }
  if (text.empty()) text = "a rank of another host has not called it";
  return text + ". All ranks must call it, in the same order";
}

}  // namespace torch_ring
