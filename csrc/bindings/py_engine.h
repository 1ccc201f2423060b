// SPDX-License-Identifier: Apache-2.0
// PyEngine: the engine of a process set, with torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/accelerator.h"
#include "bindings/blocking_call.h"
#include "bindings/requests.h"
#include "collective/world.h"
#include "core/clock.h"
#include "core/home_process.h"
#include "engine/engine.h"
#include "messages/point_to_point.h"

namespace pybind11 {
class function;
class module_;
class object;
}  // namespace pybind11

namespace torch_ring {

/// Runs Python's signal handlers (Ctrl-C) while a thread waits without the GIL.
void check_signals();

inline const Engine::Interrupt kCheckSignals = check_signals;

/// A pending result in Python: a work, its engine, and its result.
class PyWork {
 public:
  PyWork(std::shared_ptr<Engine> engine, std::shared_ptr<Work> work, std::shared_ptr<Result> result)
      : engine_(std::move(engine)), work_(std::move(work)), result_(std::move(result)) {}
  PyWork(PyWork&&) = default;
  PyWork& operator=(PyWork&&) = default;

  /// The caller may have been about to wait when a signal handler threw.
  ~PyWork() {
    if (work_ && !work_->done()) engine_->tend();
  }

  bool done() const {
    return work_->done() &&
           (!result_->output_event || work_->failed() || result_->output_event->query());
  }

  /// Waits, and returns the output. On a device the current stream waits for the output; the host
  /// waits only until it is enqueued. `waited`: another work for which the current stream waits
  /// already; may be null.
  at::Tensor wait(const PyWork* waited = nullptr) const {
    {
      const BlockingCall no_gil;
      engine_->wait(*work_, kCheckSignals);
    }
    if (result_->output_event) {
      engine_->check();
      const auto* const other = waited ? waited->result_.get() : nullptr;
      result_->output_event->wait(result_->tensor,
                                  other && other->output_event ? &*other->output_event : nullptr);
    }
    return result_->tensor;
  }

  std::vector<std::int64_t> received_splits() const { return result_->rows; }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Work> work_;
  std::shared_ptr<Result> result_;
};

/// The engine of a process set, its communicator, and objects of the same lifetime: Python's
/// `Engine` (torch_ring/_C.pyi documents the methods), which other bindings hold as well.
///
/// Thread: any, with the GIL, also for the destructor. Blocking: as Engine, without the GIL.
/// Errors: Engine's; Error(kInternal) after shutdown().
class PyEngine {
 public:
  PyEngine(World world, std::shared_ptr<ControlPlane> plane, std::uint64_t set,
           std::vector<int> members, const EngineConfig& config, NcclSettings settings,
           std::shared_ptr<LaunchOrder> order, pybind11::function log);
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  ~PyEngine() { shutdown(); }

  /// Submits the collective `asked` with its options: request_of(). The tensors may be undefined
  /// where a collective has none, or where another rank is the root; those of other ranks than the
  /// root are ignored. An undefined output becomes a new tensor. `splits`: of an alltoall.
  PyWork submit(Fingerprint&& asked, at::Tensor tensor, at::Tensor output,
                std::vector<std::int64_t> splits, bool blocking) const;

  /// Submits a group, all or none. Member i of group "g" has the name "g.i". `outputs`: one for
  /// each tensor, or none.
  std::vector<PyWork> submit_group(const Fingerprint& asked, const std::vector<at::Tensor>& tensors,
                                   const std::vector<at::Tensor>& outputs, bool blocking) const;

  /// submit() and wait() without a handle: the shortest path of a small tensor. Returns the result,
  /// undefined where there is none. An alltoall sends equally many rows to each rank.
  at::Tensor run(Fingerprint&& asked, const at::Tensor& tensor, const at::Tensor& output) const;

  PyWork join() const;

  /// join() answers the other ranks' questions by this function (Request::allocate).
  using StandIn = std::function<void*(std::span<const std::int64_t>)>;
  void stand_in_by(StandIn answer) { stand_in_ = std::move(answer); }

  /// Begins a message to another rank of the set, or the receipt of one, from `source` or from any
  /// rank (csrc/messages). The request keeps the tensor until it has ended; meanwhile nobody else
  /// writes to the tensor, or reads a received one. `deadline`: by default after timeout(). Thread:
  /// any, without the GIL. Blocking: no.
  /// Errors: Error(kInvalidArgument); the cause that has ended the messages.
  std::shared_ptr<MessageRequest> send(const at::Tensor& tensor, int destination, int tag,
                                       std::optional<Clock::time_point> deadline = {}) const;
  std::shared_ptr<MessageRequest> receive(const at::Tensor& tensor, std::optional<int> source,
                                          int tag,
                                          std::optional<Clock::time_point> deadline = {}) const;

  at::Tensor empty_shared(const std::vector<std::int64_t>& shape, pybind11::object dtype) const;
  /// The same for CPU tensors. Thread: any, without the GIL.
  at::Tensor empty_shared(const std::vector<std::int64_t>& shape, at::TensorOptions options) const;

  /// Blocks for large gradients of all optimizers of this set. Null where buckets are not in shared
  /// memory, and where they are sent during backward: large buckets keep the network busier.
  std::shared_ptr<BlockPool> gradient_blocks();
  std::size_t vacant_gradient_bytes() const { return shared_ ? shared_->vacant_bytes() : 0; }

  bool has_shared_memory() const { return size_ > hosts_; }
  bool overlaps() const { return hosts_ > 1; }

  void end(const std::string& why) const;

  void shutdown(bool removed = false, std::string why = {});

  /// In a forked child: leaks the parent's threads, locks and memory without touching them.
  void abandon();

  /// A shared reference to the engine: a signal handler may shut it down during a call.
  /// Errors: Error(kInternal) after shutdown().
  std::shared_ptr<Engine> running() const;

  /// See Engine. Empty after shutdown(). Thread: with the GIL, which they release.
  std::vector<OperationRecord> records() const;
  OperationTotals totals() const;
  void observe(std::shared_ptr<RecordStream> stream) const;

  /// See MessageRecorder. Thread: any, without the GIL.
  std::vector<MessageRecord> messages() const { return message_recorder_->records(); }
  MessageTotals message_totals() const { return message_recorder_->totals(); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The number of its process set.
  std::uint64_t set() const { return set_; }
  /// How late another rank may be; 0: no limit.
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  struct Submission {
    Request request;
    c10::Device device = at::kCPU;
    at::Tensor output = {};
    std::shared_ptr<Result> result = {};  // of rows, whose memory the request allocates
  };

  Submission submission_of(Fingerprint&& asked, at::Tensor tensor, at::Tensor output,
                           std::vector<std::int64_t> splits) const;
  PyWork submit(Submission submission, bool blocking) const;

  std::shared_ptr<MessageRequest> post(MessageSpec spec,
                                       std::optional<Clock::time_point> deadline) const;

  const HomeProcess home_;
  const int rank_;
  const int size_;
  const int hosts_;
  const std::uint64_t set_;
  const std::chrono::milliseconds timeout_;
  const Transport transport_;
  const std::shared_ptr<DeviceChoice> device_ = DeviceChoice::of_process();
  std::shared_ptr<ControlPlane> plane_;  // outlives the engine
  const std::shared_ptr<MessageRecorder> message_recorder_ = std::make_shared<MessageRecorder>();
  // Made by the constructor, and closed by shutdown(): any thread may use it. Null in a set of one.
  std::shared_ptr<PointToPoint> messages_;
  std::shared_ptr<HostCommunicator> communicator_;
  std::shared_ptr<Engine> engine_;
  std::optional<SharedTensors> shared_;
  StandIn stand_in_ = [](std::span<const std::int64_t>) -> void* { return nullptr; };
};

void bind_engine(pybind11::module_& module);

}  // namespace torch_ring
