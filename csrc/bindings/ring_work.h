// PendingOperation and RingWork: an operation of torch.distributed that has begun.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bindings/c10d_requests.h"
#include "bindings/future_pool.h"
#include "bindings/streams.h"
#include "engine/engine.h"
#include "messages/message_request.h"

namespace torch_ring {

/// A point in time at which an operation has failed; none: its own timeout counts alone.
using OperationDeadline = std::optional<std::chrono::steady_clock::time_point>;

/// An operation that has begun: a collective, or a message.
/// Thread: any, without the GIL.
class PendingOperation {
 public:
  virtual ~PendingOperation() = default;

  virtual bool done() const = 0;

  /// Blocks until it is done. Python's signal handlers run in a thread of Python's. A deadline that
  /// passes ends the group on all ranks. Errors: the operation's; an exception of a signal handler,
  /// after which the operation goes on.
  virtual void wait(OperationDeadline deadline) const = 0;

  /// Makes this thread's current stream wait for outputs on a device. Precondition: done().
  virtual void synchronize() const = 0;

  virtual const Tensors& outputs() const = 0;

  /// The rank that has sent a message. Precondition: a receive that is done.
  virtual int source() const;
};

/// A collective that the engine runs. A thread that waits makes progress itself.
class PendingCollective final : public PendingOperation {
 public:
  /// Submits the operation's requests. Errors: Error(kInvalidArgument); the engine's fatal cause.
  PendingCollective(std::shared_ptr<Engine> engine, C10dOperation operation, Engine::Mode mode);

  bool done() const override;
  void wait(OperationDeadline deadline) const override;
  void synchronize() const override;
  const Tensors& outputs() const override { return outputs_; }

 private:
  std::shared_ptr<Engine> engine_;
  Tensors outputs_;
  std::shared_ptr<LateError> late_error_;
  std::vector<OutputEvent> events_;  // on a device, one for each request
  std::vector<std::shared_ptr<Work>> works_;
};

/// A message to or from another rank.
class PendingMessage final : public PendingOperation {
 public:
  PendingMessage(std::shared_ptr<Engine> engine, std::shared_ptr<MessageRequest> request,
                 at::Tensor tensor)
      : engine_(std::move(engine)), request_(std::move(request)), tensors_{std::move(tensor)} {}

  bool done() const override { return request_->done(); }
  void wait(OperationDeadline deadline) const override;
  void synchronize() const override {}
  const Tensors& outputs() const override { return tensors_; }
  int source() const override { return request_->source(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<MessageRequest> request_;
  Tensors tensors_;
};

/// A PendingOperation as torch.distributed sees it. A future is made only if asked for; the pool
/// completes it.
/// Thread: any, without the GIL.
class RingWork final : public c10d::Work {
 public:
  RingWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs,
           std::unique_ptr<PendingOperation> operation, std::shared_ptr<FuturePool> pool,
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

  const std::unique_ptr<PendingOperation> operation_;
  const std::shared_ptr<FuturePool> pool_;
  const ::pid_t pid_ = ::getpid();  // only this process may wait
  const std::uint64_t sequence_;
  std::mutex future_mutex_;  // guards the next two
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool finished_ = false;
};

}  // namespace torch_ring
