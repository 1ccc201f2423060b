// PyEngine: the engine of a process set, with torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/accelerator.h"
#include "bindings/finalize_dense.h"
#include "bindings/launcher.h"
#include "bindings/py_work.h"
#include "bindings/run_ahead.h"
#include "bindings/shared_tensors.h"
#include "collective/world.h"
#include "core/clock.h"
#include "engine/engine.h"
#include "messages/point_to_point.h"

namespace torch_ring {

/// The engine of a process set, its communicator, and what lives as long as they do: Python's
/// `Engine` (torch_ring/_C.pyi documents the methods), which other bindings hold as well.
///
/// Thread: any, with the GIL, which its end needs, too. Blocking: as Engine, without the GIL.
/// Errors: Engine's; Error(kInternal) after shutdown().
class PyEngine {
 public:
  PyEngine(World world, std::shared_ptr<ControlPlane> plane, std::uint64_t set,
           std::vector<int> members, const EngineConfig& config, NcclSettings settings,
           std::shared_ptr<LaunchOrder> order, pybind11::function log);
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  ~PyEngine() { shutdown(); }

  PyWork allreduce(const at::Tensor& tensor, const at::Tensor& output, std::string name, int op,
                   double prescale, double postscale, bool blocking) const;

  /// A blocking allreduce without a handle: the shortest path of a small tensor. Returns the
  /// output, which is a new tensor if none is given.
  at::Tensor allreduce_and_wait(const at::Tensor& tensor, std::optional<at::Tensor> output,
                                std::string name, int op, double prescale, double postscale) const;

  Launched launch_allreduce(const at::Tensor& tensor, int op, double prescale,
                            double postscale) const;

  PyWork broadcast(const at::Tensor& tensor, const at::Tensor& output, int root, std::string name,
                   bool blocking) const;

  PyWork allgather(const at::Tensor& tensor, std::string name, bool blocking, bool joinable) const;

  PyWork alltoall(const at::Tensor& tensor, std::vector<std::int64_t> splits, std::string name,
                  bool blocking) const;

  PyWork reducescatter(const at::Tensor& tensor, const at::Tensor& output, std::string name, int op,
                       double prescale, double postscale, bool blocking) const;

  // Only the root has the output of a reduce or gather: by default a new tensor. Only it has the
  // `tensor` of a scatter.
  PyWork reduce(const at::Tensor& tensor, int root, std::string name, int op, double prescale,
                double postscale, std::optional<at::Tensor> output, bool blocking) const;

  PyWork gather(const at::Tensor& tensor, int root, std::string name,
                std::optional<at::Tensor> output, bool blocking) const;

  PyWork scatter(const at::Tensor& output, int root, std::string name,
                 std::optional<at::Tensor> tensor, bool blocking) const;

  PyWork barrier(std::string name, bool blocking, bool reset) const;

  PyWork join() const;

  std::vector<PyWork> grouped_allreduce(const std::vector<at::Tensor>& tensors,
                                        const std::vector<at::Tensor>& outputs,
                                        const std::string& name, int op, double prescale,
                                        double postscale, bool blocking) const;

  std::vector<PyWork> grouped_allgather(const std::vector<at::Tensor>& tensors,
                                        const std::string& name, bool blocking,
                                        bool joinable) const;

  std::vector<PyWork> grouped_reducescatter(const std::vector<at::Tensor>& tensors,
                                            const std::vector<at::Tensor>& outputs,
                                            const std::string& name, int op, double prescale,
                                            double postscale, bool blocking) const;

  /// Begins a message to another rank of the set, or the receipt of one, from `source` or from any
  /// rank (csrc/messages). Until the request has ended it keeps the tensor, to which nobody else
  /// writes; a received one is not read either. `deadline`: by default as late as timeout() allows.
  /// Thread: any, without the GIL. Blocking: no.
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

  std::optional<pybind11::bytes> finalize_dense(const DenseFinalizer& finalizer,
                                                PassAgreement& agreement,
                                                const std::string& report) const;

  pybind11::bytes gather_reports(PassAgreement& agreement, const std::string& report) const;

  std::shared_ptr<RunAhead> run_ahead();

  void end(const std::string& why) const;

  void shutdown(bool removed = false);

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
  /// How late another rank may be; 0: it is waited for without end.
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  void prepare(Request& request, Result& result, c10::Device device) const;

  PyWork submit(Request request, std::shared_ptr<Result> result, c10::Device device,
                bool blocking) const;

  std::vector<PyWork> submit(std::vector<Member> members, bool blocking) const;

  std::shared_ptr<MessageRequest> post(MessageSpec spec,
                                       std::optional<Clock::time_point> deadline) const;

  const pid_t pid_;
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
  std::shared_ptr<RunAhead> run_ahead_;
};

void bind_engine(pybind11::module_& module);

}  // namespace torch_ring
