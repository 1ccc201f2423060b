// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bindings/accelerator.h"
#include "c10d/c10d_requests.h"
#include "core/error.h"
#include "core/home_process.h"
#include "engine/engine.h"
#include "messages/message_request.h"

namespace torch_ring {

/// An operation with a future.
struct Completion {
  std::function<void()> await;     // blocks until the operation is done or has failed; never throws
  std::function<void()> complete;  // completes the future: runs its callbacks, which may block
};

/// Threads that wait for the operations of one group and complete their futures, in the order in
/// which they were added. One thread at a time waits for operations, and makes progress on them.
/// While it completes a future, another thread takes that role if a callback requests a future
/// itself, or lasts long: the callback may wait for a later operation of the group, as PowerSGD's
/// does. So there are one or two more threads than waiting callbacks. A pool without futures has no
/// threads.
///
/// Thread: any. Blocking: stop() only.
class FuturePool {
 public:
  FuturePool();
  ~FuturePool() { stop(); }
  FuturePool(const FuturePool&) = delete;
  FuturePool& operator=(const FuturePool&) = delete;

  /// Errors: std::system_error if there is no thread and none can be started.
  void add(Completion completion);

  /// Waits, without the GIL, until the threads have completed all futures, for a second at most: a
  /// callback may be waiting for the caller. Call it when the operations have failed or are done.
  void stop();

  /// In a forked child, which lacks the threads: leaks their objects.
  void abandon();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  static void call_a_thread(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // the threads, which are detached, share it
};

/// The time at which a wait fails; none: only the operation's own timeout counts.
using OperationDeadline = std::optional<std::chrono::steady_clock::time_point>;

/// The function that a waiting thread calls: runs Python's signal handlers, in a thread known to
/// Python, and checks the deadline.
Engine::Interrupt interrupt_at(OperationDeadline deadline);

/// The interval at which a wait without an engine calls it.
inline constexpr std::chrono::milliseconds kInterrupts{50};

/// A requested operation: a collective, or a message.
/// Thread: any, without the GIL.
class PendingOperation {
 public:
  virtual ~PendingOperation() = default;

  virtual bool done() const = 0;

  /// Blocks until it is done. In a thread known to Python, signal handlers run meanwhile. Errors:
  /// the operation's; Error(kTimeout) when the deadline has passed, and an exception of a signal
  /// handler, after which the operation goes on.
  virtual void wait(OperationDeadline deadline) const = 0;

  /// Makes this thread's current stream wait for outputs on a device. Precondition: done().
  virtual void synchronize() const = 0;

  virtual const Tensors& outputs() const = 0;

  /// The rank that has sent a message. Precondition: a receive that is done.
  virtual int source() const;
};

/// A collective that the engine runs. A waiting thread makes progress itself.
class PendingCollective final : public PendingOperation {
 public:
  /// Submits the operation's requests. Errors: Error(kInvalidArgument); the engine's fatal cause.
  PendingCollective(std::shared_ptr<Engine> engine, C10dOperation operation, const Tensors& inputs,
                    Engine::Mode mode);

  bool done() const override;
  void wait(OperationDeadline deadline) const override;
  void synchronize() const override;
  const Tensors& outputs() const override { return outputs_; }
  const std::vector<std::shared_ptr<Work>>& works() const { return works_; }

 private:
  std::shared_ptr<Engine> engine_;
  Tensors outputs_;
  std::shared_ptr<LateError> late_error_;
  std::vector<OutputEvent> events_;  // on a device, one for each request
  std::vector<std::shared_ptr<Work>> works_;
};

/// A message to or from another rank. It has a time limit only while a thread waits for it.
class PendingMessage final : public PendingOperation {
 public:
  /// `timeout`: of a wait without a deadline, which then ends the group on all ranks; 0: none.
  PendingMessage(std::shared_ptr<Engine> engine, std::shared_ptr<MessageRequest> request,
                 at::Tensor tensor, std::chrono::milliseconds timeout)
      : engine_(std::move(engine)),
        request_(std::move(request)),
        tensors_{std::move(tensor)},
        timeout_(timeout) {}

  bool done() const override { return request_->done(); }
  void wait(OperationDeadline deadline) const override;
  void synchronize() const override {}
  const Tensors& outputs() const override { return tensors_; }
  int source() const override { return request_->source(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<MessageRequest> request_;
  Tensors tensors_;
  std::chrono::milliseconds timeout_;
};

/// An operation of a group that is being connected. The connecting thread begins it, or fails it.
class DeferredOperation final : public PendingOperation {
 public:
  /// Begins the operation. Errors: those of PendingCollective and of PyEngine::send().
  using Begin = std::function<std::shared_ptr<PendingOperation>()>;

  /// `outputs`: on the host.
  DeferredOperation(Tensors outputs, Begin begin)
      : outputs_(std::move(outputs)), begin_(std::move(begin)) {}

  /// Call it once, or fail() instead.
  void begin();
  void fail(const Error& error);

  bool done() const override;
  void wait(OperationDeadline deadline) const override;
  void synchronize() const override {}
  const Tensors& outputs() const override { return outputs_; }
  int source() const override;

 private:
  const Tensors outputs_;
  Begin begin_;
  mutable std::mutex mutex_;  // guards the next two
  std::shared_ptr<PendingOperation> begun_;
  std::optional<Error> error_;
  mutable std::condition_variable changed_;
};

/// A PendingOperation for torch.distributed. A future is made only on demand; the pool completes
/// it. Its value is the list of outputs.
/// Thread: any, without the GIL.
class RingWork final : public c10d::Work {
 public:
  RingWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs,
           std::shared_ptr<PendingOperation> operation, std::shared_ptr<FuturePool> pool,
           std::uint64_t sequence);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

  /// Blocks until the operation is done or has failed. Throws nothing.
  void await();

 private:
  void complete_future();
  void finish_once(std::exception_ptr error);

  const std::shared_ptr<PendingOperation> operation_;
  const std::shared_ptr<FuturePool> pool_;
  const HomeProcess home_;  // only this process may wait
  const std::uint64_t sequence_;
  std::mutex future_mutex_;  // guards the next two
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool finished_ = false;
};

}  // namespace torch_ring
