// Engine: queues requests, agrees on them with the other ranks, and runs them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collective/host_communicator.h"
#include "core/config.h"
#include "engine/agreement.h"
#include "engine/device.h"
#include "engine/executor.h"
#include "engine/names.h"
#include "engine/request.h"
#include "engine/watchdog.h"

namespace torch_ring {

/// One thread at a time *makes progress* (MPI's word): it posts entries, completes rounds and runs
/// collectives. A thread that waits for a result makes progress itself, because waking another one
/// costs more than a small allreduce; the engine's own thread makes progress when there are
/// requests that nobody waits for. The thread that does so now is called the progress thread.
///
///   submit -> queue_ -> outbox_ (of the progress thread) -> pending_ (announced) -> complete
///
/// Thread: any. Blocking: wait() only.
/// Errors: a failed collective is its work's error. After a fatal one (Error::fatal()) every
/// pending and every later request fails with the same cause.
class Engine {
 public:
  using Log = std::function<void(const std::string&)>;
  /// Called now and then while a thread waits; what it throws ends the wait, not the work.
  using Interrupt = std::function<void()>;

  struct Options {
    EngineConfig config;
    std::vector<std::string> labels;   // by rank
    std::vector<Fd> control;           // by rank: the watchdog's connections
    Log log;                           // takes a warning; Thread: any
    DeviceExecutor::Make make_device;  // may be empty
  };

  /// `abort` is the one that the communicator's waits see.
  Engine(std::shared_ptr<HostCommunicator> communicator, std::shared_ptr<Abort> abort,
         Options options);
  ~Engine() { close(); }

  /// Fails what is pending and whatever comes later, says goodbye to the peers, joins the threads.
  void close();

  enum class Mode {
    kAsynchronous,  // started by the engine after the fusion window
    kBlocking,      // the caller is about to wait(): nobody else is woken
  };
  /// Errors: Error(kInvalidArgument) when the name is in flight or reserved; the fatal cause.
  std::shared_ptr<Work> submit(Request request, Mode mode);

  /// Submits all or, if one of them cannot be, none.
  std::vector<std::shared_ptr<Work>> submit(std::vector<Request> requests, Mode mode);

  /// Blocks until the work is done, and makes progress if no other thread does. Throws the work's
  /// error.
  void wait(Work& work, const Interrupt& interrupt);

  /// submit() and wait() in one, for less than both: for operations that take microseconds.
  void submit_and_wait(Request request, const Interrupt& interrupt);

  /// Throws the fatal cause, if there is one: what was enqueued on a device is void then.
  void check() const {
    if (!closed_) abort_->check();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void run();  // the engine's thread
  /// Makes this the progress thread until `target` is done (or, without a target, until there is
  /// nothing to do or a waiting thread can make progress instead). `lock` is released meanwhile.
  void progress_exclusively(Lock& lock, const Work* target, const Interrupt& interrupt);
  std::shared_ptr<Work> make_work(Request request) const;
  /// With the lock held.
  void enqueue(std::span<const std::shared_ptr<Work>> works, Mode mode);
  void wait(Lock& lock, Work& work, const Interrupt& interrupt);
  void take_queue();
  /// Whether this is the progress thread, at a point where nothing is half done: in its interrupt.
  /// That may be a signal handler which waits for another work, and so makes progress too, or
  /// closes the engine.
  bool pausing_here() const {
    return progressing_ && progress_thread_ == std::this_thread::get_id() && paused_;
  }
  bool idle() const { return queue_.empty() && outbox_.empty() && pending_.empty(); }
  void fail_all();

  // By the progress thread, without the lock:
  void make_progress(const Work* target, const Interrupt& interrupt);
  bool should_yield();
  bool only_submitter();
  void announce_outbox(bool blocked);
  void finish_round();
  bool run_unanimous();
  void reset_numbering();
  Error describe(const Work& work, const Error& error) const;
  Error departed(int rank) const;
  Error root_cause(const Error& error) const;
  void complete(Work& work, std::optional<Error> error);
  void check_stalls();
  void poll_device();
  std::string late_ranks(const Work& work) const;

  const std::shared_ptr<HostCommunicator> communicator_;
  const std::shared_ptr<Abort> abort_;
  const EngineConfig config_;
  const std::vector<std::string> labels_;
  const std::string name_;  // "rank 2"
  const Log log_;
  Board& board_;

  // The progress thread's alone:
  Agreement agreement_;
  HostBuffers host_buffers_;
  Executor executor_;
  DeviceExecutor device_;
  EntryWriter entry_;
  Bytes fingerprint_;              // of the request that is being announced
  std::vector<ByteSpan> entries_;  // of the round that is being finished
  std::deque<std::shared_ptr<Work>> outbox_;
  std::map<std::string, std::shared_ptr<Work>> pending_;
  bool round_open_ = false;
  bool paused_ = false;  // it calls its interrupt
  Clock::time_point last_decision_;
  Clock::time_point last_check_;

  std::mutex mutex_;  // guards what follows; never locked while progress is made
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Work>> queue_;
  std::atomic<bool> queued_{false};  // whether it has something, for a look without the lock
  std::size_t queued_bytes_ = 0;
  std::unordered_map<std::string, Work*> in_flight_;  // but for numbered ones: theirs are unique
  Names names_;
  std::thread::id submitter_;        // the only thread that has submitted anything...
  bool several_submitters_ = false;  // ...unless there were several
  bool progressing_ = false;
  std::thread::id progress_thread_;  // none while no progress is made
  int waiters_ = 0;                  // threads that wait for the progress thread
  bool device_was_busy_ = false;     // when progress was made last
  bool device_busy_ = false;         // work that was enqueued there has not run yet
  bool closing_ = false;
  std::atomic<bool> closed_{false};  // in peace: all that was enqueued on the device has run

  std::unique_ptr<Watchdog> watchdog_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace torch_ring
