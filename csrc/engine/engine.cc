#include "engine/engine.h"

#include <algorithm>

#include "core/at.h"

namespace torch_ring {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How often a waiting thread looks at the clock and lets its caller handle signals.
constexpr milliseconds kPollInterval{50};
// Instead of kSpin, with which the engine's thread may take the core from one that computes: a
// thread that waits has nothing else to do there, and ranks that compute the same differ by some
// hundred microseconds.
constexpr microseconds kBlockingSpin{500};
constexpr milliseconds kFarewell{1000};  // of a device whose own deadline has passed

// A rank that has waited this long with nothing new tells the others, so that all find out when
// everybody waits for something else. Mismatches are reported within a second.
constexpr milliseconds kBlockedAfter{200};

// What a departing rank has posted may be on its way; after this it is not.
constexpr milliseconds kDepartureGrace{250};

constexpr std::size_t kNameBytes = 4096;

/// What an Interrupt threw, on its way to the caller of wait().
struct Interrupted {
  std::exception_ptr cause;
};

void call(const Engine::Interrupt& interrupt) {
  try {
    if (interrupt) interrupt();
  } catch (...) {
    throw Interrupted{std::current_exception()};
  }
}

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

Engine::Engine(std::shared_ptr<HostCommunicator> communicator, std::shared_ptr<Abort> abort,
               Options options)
    : communicator_(std::move(communicator)),
      abort_(std::move(abort)),
      config_(options.config),
      labels_(options.labels),
      name_(name_in(at(labels_, communicator_->rank()))),
      log_(std::move(options.log)),
      board_(communicator_->board()),
      agreement_(labels_),
      executor_(*communicator_, host_buffers_, config_.fusion_threshold_bytes),
      device_(std::move(options.make_device), config_.fusion_threshold_bytes),
      watchdog_(std::make_unique<Watchdog>(communicator_->rank(), std::move(options.control),
                                           labels_, config_.heartbeat_timeout, *abort_,
                                           [this] {
                                             const Lock lock(mutex_);
                                             changed_.notify_all();
                                             board_.wake();
                                           })),
      thread_([this] { run(); }) {}

void Engine::close() {
  bool pausing = false;
  {
    Lock lock(mutex_);
    if (closing_) return;
    pausing = pausing_here();
    if (!pausing) {  // what still runs on the device is somebody's result
      changed_.wait_for(lock, config_.timeout + kFarewell, [&] { return !device_busy_; });
      if (closing_) return;
    }
    closing_ = true;
    if (pausing) progressing_ = false;  // or the engine's thread would wait for this one
    closed_ =
        abort_->raise(Error(ErrorKind::kInternal, "torch_ring was shut down")) && !device_busy_;
    changed_.notify_all();
    board_.wake();
  }
  thread_.join();
  if (!closed_) device_.abort();
  device_.reset();
  watchdog_.reset();
  const Lock lock(mutex_);
  if (pausing) progressing_ = true;
}

std::shared_ptr<Work> Engine::submit(Request request, Mode mode) {
  auto work = make_work(std::move(request));
  const Lock lock(mutex_);
  enqueue({&work, 1}, mode);
  return work;
}

std::vector<std::shared_ptr<Work>> Engine::submit(std::vector<Request> requests, Mode mode) {
  std::vector<std::shared_ptr<Work>> works;
  for (Request& request : requests) works.push_back(make_work(std::move(request)));
  const Lock lock(mutex_);
  enqueue(works, mode);
  return works;
}

std::shared_ptr<Work> Engine::make_work(Request request) const {
  if (request.fingerprint.name.starts_with('#')) {
    throw Error(ErrorKind::kInvalidArgument,
                "the name '" + request.fingerprint.name + "' is reserved: it begins with #");
  }
  if (request.fingerprint.name.size() > kNameBytes) {
    throw Error(ErrorKind::kInvalidArgument, "a name is longer than 4096 bytes");
  }
  auto work = std::make_shared<Work>(std::move(request));
  work->submitted_ = Clock::now();
  return work;
}

void Engine::enqueue(std::span<const std::shared_ptr<Work>> works, Mode mode) {
  abort_->check();
  for (std::size_t i = 0; i < works.size(); ++i) {
    Work& work = *works[i];
    Fingerprint& fingerprint = work.request_.fingerprint;
    const bool numbered = fingerprint.name.empty();
    if (numbered) fingerprint.name = names_.next(fingerprint.collective);
    work.key_ = key_of(fingerprint);
    if (numbered) continue;
    if (!in_flight_.emplace(work.key_, &work).second) {
      for (std::size_t earlier = 0; earlier < i; ++earlier) in_flight_.erase(works[earlier]->key_);
      throw Error(ErrorKind::kInvalidArgument,
                  name_ + ": " + fingerprint.describe() +
                      " is in flight already: a name is free again when its operation is done");
    }
  }
  for (const auto& work : works) {
    const Fingerprint& fingerprint = work->request_.fingerprint;
    queue_.push_back(work);
    queued_bytes_ += fingerprint.count() * size_of(fingerprint.dtype);
  }
  queued_.store(true, std::memory_order_release);  // seen by the progress thread, woken below
  const auto self = std::this_thread::get_id();
  if (submitter_ == std::thread::id()) submitter_ = self;
  several_submitters_ = several_submitters_ || submitter_ != self;
  if (progressing_) {
    board_.wake();
  } else if (mode == Mode::kAsynchronous) {
    changed_.notify_all();
  }
}

void Engine::wait(Work& work, const Interrupt& interrupt) {
  Lock lock(mutex_);
  wait(lock, work, interrupt);
}

void Engine::submit_and_wait(Request request, const Interrupt& interrupt) {
  const auto work = make_work(std::move(request));
  Lock lock(mutex_);
  enqueue({&work, 1}, Mode::kBlocking);
  wait(lock, *work, interrupt);
}

void Engine::wait(Lock& lock, Work& work, const Interrupt& interrupt) {
  while (!work.done()) {
    if (!progressing_ || pausing_here()) {
      progress_exclusively(lock, &work, interrupt);
      continue;
    }
    if (progress_thread_ == std::this_thread::get_id()) {
      throw Error(ErrorKind::kInvalidArgument, name_ + ": a log handler cannot wait for " +
                                                   work.request().fingerprint.describe());
    }
    ++waiters_;
    board_.wake();
    changed_.wait_for(lock, kPollInterval, [&] { return work.done() || !progressing_; });
    --waiters_;
    lock.unlock();
    if (interrupt) interrupt();
    lock.lock();
  }
  lock.unlock();
  work.check();
}

void Engine::run() {
  Lock lock(mutex_);
  while (!closing_) {
    const auto due = [&] { return closing_ || (!progressing_ && waiters_ == 0 && !idle()); };
    changed_.wait(lock, [&] { return device_busy_ || due(); });
    if (device_busy_ && !changed_.wait_for(lock, kPollInterval, due)) {
      // The device alone: progress_exclusively() asks whether it is busy still.
      if (!progressing_ && !closing_) progress_exclusively(lock, nullptr, {});
      continue;
    }
    // The fusion window: more may come, unless there is enough already or another thread waits and
    // so makes progress.
    changed_.wait_for(lock, config_.fusion_window, [&] {
      return closing_ || progressing_ || queued_bytes_ >= config_.fusion_threshold_bytes;
    });
    if (!progressing_ && !closing_) progress_exclusively(lock, nullptr, {});
  }
  changed_.wait(lock, [&] { return !progressing_; });
  fail_all();
}

void Engine::progress_exclusively(Lock& lock, const Work* target, const Interrupt& interrupt) {
  const bool pausing = progressing_;
  progressing_ = true;
  progress_thread_ = std::this_thread::get_id();
  paused_ = false;
  bool device_busy = false;
  std::exception_ptr interrupted;
  try {
    take_queue();
    lock.unlock();
    make_progress(target, interrupt);
    device_busy = device_.busy();
  } catch (const Interrupted& caught) {
    interrupted = caught.cause;
    device_busy = true;  // for all that is known here
  } catch (const Error& error) {
    const Error cause = root_cause(error);
    if (abort_->raise(cause)) watchdog_->announce(cause);
  } catch (const std::exception& error) {  // out of memory, say: the ranks are out of step
    const Error cause(ErrorKind::kInternal, error.what());
    if (abort_->raise(cause)) watchdog_->announce(cause);
  }
  if (!lock.owns_lock()) lock.lock();
  if (abort_->raised() && !closing_) {  // else close() sees to it
    lock.unlock();
    device_.abort();  // or its stream waits for ever, and so does who waits for the stream
    device_busy = false;
    lock.lock();
  }
  progressing_ = paused_ = pausing;
  if (!pausing) progress_thread_ = {};
  if (abort_->raised()) fail_all();
  device_busy_ = device_busy;
  if (waiters_ > 0 || !idle() || closing_ || device_busy != device_was_busy_) {
    changed_.notify_all();
  }
  device_was_busy_ = device_busy;
  if (interrupted) {
    lock.unlock();
    std::rethrow_exception(interrupted);
  }
}

void Engine::make_progress(const Work* target, const Interrupt& interrupt) {
  std::optional<Clock::time_point> since;  // when it began to wait
  bool long_since = false;
  bool told_blocked = false;
  while (target == nullptr || !target->done()) {
    abort_->check();
    if (queued_.load(std::memory_order_acquire)) {
      const Lock lock(mutex_);
      take_queue();
    }
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
    if (target == nullptr && should_yield()) return;
    auto now = Clock::now();
    if (!since) since = now;
    const bool is_patient = target != nullptr && now - *since < kBlockingSpin;
    board_.wait_until(now + kPollInterval, is_patient ? kBlockingSpin : kSpin);
    // While rounds go on, there is little to look at.
    now = Clock::now();
    if (round_open_ && now - last_check_ < kPollInterval && board_.complete()) continue;
    last_check_ = now;
    check_stalls();
    long_since = target != nullptr && now - *since > kBlockedAfter;
    if (device_.exists()) poll_device();
    paused_ = true;
    call(interrupt);
    paused_ = false;
  }
}

/// Moves what was submitted to the outbox. With the lock held.
void Engine::take_queue() {
  outbox_.insert(outbox_.end(), queue_.begin(), queue_.end());
  queue_.clear();
  queued_bytes_ = 0;
  queued_.store(false, std::memory_order_relaxed);
}

/// Whether another thread can make progress, or none should: the engine's thread leaves then.
bool Engine::should_yield() {
  const Lock lock(mutex_);
  return waiters_ > 0 || closing_;
}

/// Whether the thread that waits is the only one that could submit anything.
bool Engine::only_submitter() {
  const Lock lock(mutex_);
  return !several_submitters_;
}

Error Engine::departed(int rank) const {
  return {ErrorKind::kPeerLost, at(labels_, rank) + " has left: it called shutdown() or exited"};
}

/// Why a transfer failed. A rank that fails closes its connections, so that its peers lose it; its
/// cause is on its way to the watchdog, or its goodbye is. Peers may still be finishing a
/// collective in which the departed rank took part, which raising the abort at once would spoil.
Error Engine::root_cause(const Error& error) const {
  if (error.kind() != ErrorKind::kPeerLost) return error;
  auto departure = watchdog_->departure();
  const auto since = Clock::now();
  while (!abort_->raised() &&
         Clock::now() - (departure ? departure->since : since) < kDepartureGrace) {
    std::this_thread::sleep_for(milliseconds(1));
    if (!departure) departure = watchdog_->departure();
  }
  return departure ? departed(departure->rank) : error;
}

/// With the lock held, no progress thread, and the abort raised.
void Engine::fail_all() {
  std::optional<Error> cause;
  try {
    abort_->check();
  } catch (const Error& error) {
    cause = error;
  }
  const auto fail = [&](Work& work) {
    in_flight_.erase(work.key_);
    work.complete(describe(work, *cause));
  };
  for (const auto& work : queue_) fail(*work);
  for (const auto& work : outbox_) fail(*work);
  for (const auto& [key, work] : pending_) fail(*work);
  queue_.clear();
  outbox_.clear();
  pending_.clear();
  changed_.notify_all();
}

void Engine::check_stalls() {
  if (pending_.empty() || (round_open_ && board_.complete())) return;
  const auto now = Clock::now();
  if (const auto departure = watchdog_->departure();
      departure && now - departure->since > kDepartureGrace) {
    throw departed(departure->rank);
  }
  for (const auto& [key, work] : pending_) {
    // Who has joined waits as long as the others get on.
    const bool joined = work->request().fingerprint.collective == Collective::kJoin;
    const auto age = now - (joined ? std::max(work->submitted_, last_decision_) : work->submitted_);
    if (age > config_.timeout) {
      throw Error(ErrorKind::kTimeout,
                  late_ranks(*work) + " within " + std::to_string(seconds(config_.timeout)) + " s");
    }
    if (config_.stall_warning.count() > 0 && age > config_.stall_warning && !work->warned_) {
      work->warned_ = true;
      log_(name_ + " has waited " + std::to_string(static_cast<int>(seconds(age))) + " s for " +
           work->request().fingerprint.describe() + ": " + late_ranks(*work));
    }
  }
}

/// Keeps device_busy_ up to date while this thread makes progress for long: close() waits for it.
void Engine::poll_device() {
  const bool busy = device_.busy();
  const Lock lock(mutex_);
  if (std::exchange(device_busy_, busy) != busy) changed_.notify_all();
}

/// "rank 2 (pid 7) has not submitted it (it waits for allreduce 'b' float32 [3] Sum)"
std::string Engine::late_ranks(const Work& work) const {
  std::vector<int> late = agreement_.missing(work.key_);
  if (late.empty() && round_open_) late = board_.missing();
  std::string text;
  for (const int rank : late) {
    text += (text.empty() ? "" : ", ") + at(labels_, rank) +
            " has not submitted it (it waits for " + agreement_.waits_for(rank) + ")";
  }
  return text.empty() ? "not every rank has submitted it" : text;
}

}  // namespace torch_ring
