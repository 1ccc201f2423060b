// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/at.h"
#include "core/failpoint.h"

namespace torch_ring {

namespace {

using std::chrono::milliseconds;

constexpr const char* kShutDown = "torch_ring was shut down";

// How long close() waits for a device that still runs the program's own work before collectives.
constexpr milliseconds kOwnWork{std::chrono::minutes(5)};

// How long beyond the timeout close() waits for a device, whose calls' waits end with the timeout.
constexpr milliseconds kFarewell{1000};

// A launch needs all ranks: a rank that has left, after any number of rounds, explains its failure.
constexpr std::uint64_t kAnyRound = std::numeric_limits<std::uint64_t>::max();

/// The exception of an Interrupt, on its way through the driver to the caller of wait().
struct Interrupted {
  std::exception_ptr cause;
};

}  // namespace

Engine::Engine(std::shared_ptr<HostCommunicator> communicator, std::shared_ptr<Abort> abort,
               Options options)
    : communicator_(std::move(communicator)),
      abort_(std::move(abort)),
      config_(options.config),
      follow_(std::move(options.follow)),
      name_(name_in(at(options.labels, communicator_->rank()))),
      board_(communicator_->board()),
      queue_(name_, options.set, options.transport),
      watchdog_(options.plane, options.set, std::move(options.members), options.labels,
                config_.words.leave, *abort_,
                [this] {
                  const Lock lock = queue_.lock();
                  changed_.notify_all();
                  board_.wake();
                }),
      role_(*communicator_, *abort_, watchdog_, queue_, static_cast<Driver::Callbacks&>(*this),
            Driver::Options{config_, std::move(options.labels), std::move(options.waits),
                            std::move(options.log), std::move(options.others_may_submit),
                            std::move(options.make_device), std::move(options.launch_order),
                            options.set}),
      thread_([this] { run(); }) {}

void Engine::close(Ending ending, std::string why) {
  Lock lock = queue_.lock();
  // A signal handler may close the engine, in an interrupt of the progress thread.
  const bool pausing = role_.is_paused_here(lock);
  if (!pausing && !closing_) {
    lock.unlock();
    try {
      call_watch(true);
    } catch (const std::exception&) {  // the world has ended already
    }
    lock.lock();
  }
  is_leaving_ = true;
  if (!pausing) {  // the device may still write results
    // The device itself notices that it waits for other ranks for too long.
    changed_.wait_for(lock, std::max(config_.transfer_timeout(), kOwnWork) + kFarewell,
                      [&] { return !device_busy_ || closing_; });
  }
  if (closing_) return await_close(lock);
  closing_ = true;
  if (pausing) role_.lend(lock);  // otherwise the engine's thread would wait for this one
  closed_ = abort_->raise(Error(ErrorKind::kInternal, kShutDown)) && !device_busy_;
  changed_.notify_all();
  board_.wake();
  lock.unlock();
  thread_.join();
  lock.lock();
  if (pausing) role_.take_back(lock);
  {
    const ProgressRole::Turn turn(role_, lock);
    lock.unlock();
    if (!closed_) turn.driver().abort_device();
    turn.driver().reset_device();
    if (ending == Ending::kLeaves) watchdog_.leave(turn.driver().rounds(), std::move(why));
    lock.lock();
  }
  lock.unlock();
  watchdog_.stop();
  lock.lock();
  is_closed_ = true;
  changed_.notify_all();
}

/// Waits until the first call of close() has ended, because callers then free objects that the
/// engine uses.
void Engine::await_close(Lock& lock) {
  const bool pausing = role_.is_paused_here(lock);
  if (role_.is_mine(lock) && !pausing) return;  // the first caller waits for this thread
  if (pausing) role_.lend(lock);
  changed_.notify_all();
  changed_.wait(lock, [&] { return is_closed_ && (!pausing || !role_.is_taken(lock)); });
  if (pausing) role_.take_back(lock);
}

void Engine::call_watch(bool on_device) {
  if (!has_watch_.load(std::memory_order_acquire)) return;
  std::shared_ptr<const Watch> watch;
  {
    const std::scoped_lock lock(watch_mutex_);
    watch = watch_;
  }
  const auto is_caller = [](std::thread::id thread) {
    return thread == std::this_thread::get_id();
  };
  if (watch && (on_device || std::ranges::any_of(watch->threads, is_caller))) watch->call();
}

std::shared_ptr<Work> Engine::submit(Request request, Mode mode) {
  call_watch(!request.fingerprint.on_host());
  if (follow_) follow_(request);
  auto work = RequestQueue::make_work(std::move(request));
  enqueue(queue_.lock(), {&work, 1}, mode);
  return work;
}

std::vector<std::shared_ptr<Work>> Engine::submit(std::vector<Request> requests, Mode mode) {
  std::vector<std::shared_ptr<Work>> works;
  for (Request& request : requests) {
    call_watch(!request.fingerprint.on_host());
    if (follow_) follow_(request);
    works.push_back(RequestQueue::make_work(std::move(request)));
  }
  enqueue(queue_.lock(), works, mode);
  return works;
}

void Engine::submit_and_wait(Request request, const Interrupt& interrupt) {
  call_watch(!request.fingerprint.on_host());
  if (follow_) follow_(request);
  const auto work = RequestQueue::make_work(std::move(request));
  Lock lock = queue_.lock();
  enqueue(lock, {&work, 1}, Mode::kBlocking);
  wait(lock, *work, interrupt);
}

void Engine::enqueue(const Lock& lock, std::span<const std::shared_ptr<Work>> works, Mode mode) {
  require_open(lock);
  queue_.add(lock, works);
  if (role_.is_taken(lock)) {
    board_.wake();
  } else if (mode == Mode::kAsynchronous) {
    changed_.notify_all();
  }
}

/// Throws the cause of the abort, if there is one, to a later caller.
void Engine::require_world() const {
  try {
    abort_->check();
  } catch (const Error& cause) {
    refuse(cause);
  }
}

/// Throws if the world has ended, or if this rank is about to leave it: without end another thread
/// could give the device work for which close() waits.
void Engine::require_open(const Lock&) const {
  require_world();
  if (is_leaving_) refuse(Error(ErrorKind::kInternal, kShutDown));
}

void Engine::refuse(const Error& cause) const {
  const Words& words = config_.words;
  throw Error(cause.kind(), name_ + ": this " + words.whole + " has ended: " + cause.what() + ". " +
                                words.remedy);
}

void Engine::end(const Error& cause) { end(Watchdog::Cause{cause, false}); }

void Engine::end(const Watchdog::Cause& cause) {
  fail(cause);
  {
    const Lock lock = queue_.lock();
    changed_.notify_all();
    board_.wake();
  }
  require_world();
  throw cause.error;  // for the compiler: the abort is raised
}

void Engine::launch(const Fingerprint& what, const Enqueue& enqueue, const Interrupt& interrupt,
                    bool promised) {
  if (!promised) call_watch(true);
  bool begun = false;
  try {
    while (const std::shared_ptr<Work> earlier = try_launch(what, enqueue, begun)) {
      try {
        wait(*earlier, interrupt);
      } catch (const Error&) {  // of the work: its own waiter gets it
        if (!earlier->done()) throw;
      }
    }
  } catch (const Error& error) {
    if (!begun) throw;
    end(watchdog_.root_cause(error, kAnyRound));
  } catch (const std::exception& error) {
    if (!begun) throw;
    end(Error(ErrorKind::kInternal, error.what()));
  }
}

/// Launches, unless an earlier request on the device is not enqueued yet; then returns that
/// request. Sets `begun` when a failure from then on leaves the ranks out of step.
std::shared_ptr<Work> Engine::try_launch(const Fingerprint& what, const Enqueue& enqueue,
                                         bool& begun) {
  DeviceExecutor& device = role_.device();
  OperationRecord record;
  const DeviceGate::Pass pass = device.enter();
  {
    const Lock lock = queue_.lock();
    require_open(lock);
    if (!pass) throw Error(ErrorKind::kTimeout, name_ + ": another thread's launch hangs");
    // The progress thread launches for a rank that has joined, at the place of a decision: requests
    // that are decided later come after it.
    const bool waits = !role_.is_mine(lock) || role_.is_paused_here(lock);
    if (auto earlier = queue_.first_on_device(lock); earlier && waits) return earlier;
    if (!device.exists()) {
      throw Error(ErrorKind::kInternal,
                  name_ + ": a launch needs an agreed operation on the device before it");
    }
    record = queue_.add_launch(lock, what);
    begun = true;
    // From now on the engine's thread polls; it finds the device idle only after the launch.
    if (!std::exchange(device_busy_, true)) changed_.notify_all();
  }
  const auto end = [&](const std::string* error) {
    const Lock lock = queue_.lock();
    queue_.recorder(lock).launched(std::move(record), error);
  };
  try {
    device.use(enqueue);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    end(&text);
    throw;
  }
  end(nullptr);
  return nullptr;
}

void Engine::wait(Work& work, const Interrupt& interrupt) {
  Lock lock = queue_.lock();
  wait(lock, work, interrupt);
}

void Engine::wait(Lock& lock, Work& work, const Interrupt& interrupt) {
  while (!work.done()) {
    if (!role_.is_taken(lock) || role_.is_paused_here(lock)) {
      progress_exclusively(lock, &work, interrupt);
      continue;
    }
    if (role_.is_mine(lock)) {
      throw Error(ErrorKind::kInvalidArgument, name_ + ": a log handler cannot wait for " +
                                                   work.request().fingerprint.describe());
    }
    ++waiters_;
    board_.wake();
    const bool is_over = changed_.wait_for(lock, Driver::kPollInterval,
                                           [&] { return work.done() || !role_.is_taken(lock); });
    --waiters_;
    if (is_over) {
      // The progress thread may have yielded to this thread, which leaves with its result.
      if (work.done()) tend(lock);
      continue;
    }
    lock.unlock();
    if (interrupt) interrupt();
    lock.lock();
  }
  lock.unlock();
  failpoint("waited", communicator_->rank());
  work.check();
}

void Engine::run() {
  Lock lock = queue_.lock();
  while (!closing_) {
    const auto due = [&] {
      if (closing_) return true;
      // A device without work is aborted, too, because its memory and connections are useless now.
      if (abort_->raised() && !ended_ && !role_.is_taken(lock)) return true;
      return waiters_ == 0 && needs_progress(lock);
    };
    changed_.wait(lock, [&] { return device_busy_ || due(); });
    if (device_busy_ && !changed_.wait_for(lock, Driver::kPollInterval, due)) {
      // Only the device is busy: progress_exclusively() asks whether it still is.
      if (!role_.is_taken(lock) && !closing_) progress_exclusively(lock, nullptr, {});
      continue;
    }
    // The fusion window: more requests may come. It ends early if there are enough, or if another
    // thread waits and so makes progress.
    changed_.wait_for(lock, config_.fusion_window, [&] {
      return closing_ || role_.is_taken(lock) ||
             queue_.bytes(lock) >= config_.fusion_threshold_bytes;
    });
    if (!role_.is_taken(lock) && !closing_) progress_exclusively(lock, nullptr, {});
  }
  changed_.wait(lock, [&] { return !role_.is_taken(lock); });
  const ProgressRole::Turn turn(role_, lock);
  lock.unlock();
  turn.driver().isolate_buffers();
  lock.lock();
  fail_all(lock, turn.driver());
}

void Engine::progress_exclusively(Lock& lock, const Work* target, const Interrupt& interrupt) {
  std::exception_ptr interrupted;
  {
    const ProgressRole::Turn turn(role_, lock);
    Driver& driver = turn.driver();
    try {
      driver.take_submitted(lock);
      lock.unlock();
      driver.make_progress(target, interrupt);
      driver.poll_device();
    } catch (const Interrupted& caught) {
      interrupted = caught.cause;
    } catch (const Error& error) {
      fail(watchdog_.root_cause(error, driver.rounds() + 1));
    } catch (const std::exception& error) {  // such as bad_alloc: the ranks are out of step
      fail({Error(ErrorKind::kInternal, error.what()), false});
    }
    if (!lock.owns_lock()) lock.lock();
    if (abort_->raised()) {
      const bool aborts_device = !closing_;  // close() does it itself
      lock.unlock();
      // Otherwise the stream, and threads that wait for it, would wait for other ranks for ever.
      if (aborts_device) driver.abort_device();
      driver.isolate_buffers();
      lock.lock();
      device_busy_ = false;
      ended_ = true;
      fail_all(lock, driver);
    }
  }
  if (waiters_ > 0 || needs_progress(lock) || closing_) changed_.notify_all();
  if (interrupted) {
    lock.unlock();
    std::rethrow_exception(interrupted);
  }
}

/// Wakes the engine's thread to make progress, if no other thread does or is about to.
void Engine::tend(const Lock& lock) {
  if (waiters_ == 0 && needs_progress(lock)) changed_.notify_all();
}

/// Whether there are works to make progress on, and no progress thread.
bool Engine::needs_progress(const Lock& lock) const {
  return role_.is_needed(lock) || (queue_.has_works() && !role_.is_taken(lock));
}

/// Ends the job on this rank, and tells the others the cause, unless it is a departure: another
/// rank may still have to complete a round in which the departed one took part.
void Engine::fail(const Watchdog::Cause& cause) {
  if (abort_->raise(cause.error) && !cause.is_departure) watchdog_.announce(cause.error);
}

/// Fails all works with the cause of the abort. Precondition: the abort is raised.
void Engine::fail_all(const Lock& lock, Driver& driver) {
  try {
    abort_->check();
  } catch (const Error& cause) {
    driver.fail_all(lock, cause);
  }
  changed_.notify_all();
}

void Engine::completed(const Lock&) {
  if (waiters_ > 0) changed_.notify_all();
}

void Engine::set_device_busy(bool busy) {
  const Lock lock = queue_.lock();
  // Busy: the engine's thread has to poll. Idle: close() may go on.
  if (std::exchange(device_busy_, busy) != busy) changed_.notify_all();
}

bool Engine::should_yield() {
  const Lock lock = queue_.lock();
  return waiters_ > 0 || closing_;
}

void Engine::pause(const Interrupt& interrupt) {
  role_.pause([&] {
    try {
      if (interrupt) interrupt();
    } catch (...) {
      throw Interrupted{std::current_exception()};
    }
  });
}

}  // namespace torch_ring
