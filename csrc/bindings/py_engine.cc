#include "bindings/py_engine.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <memory>

#include "bindings/accelerator.h"
#include "bindings/blocking_call.h"
#include "bindings/finalize_dense.h"
#include "bindings/py_control_plane.h"
#include "bindings/py_host_memory.h"
#include "bindings/py_launch.h"
#include "bindings/py_work.h"
#include "bindings/py_world.h"
#include "bindings/requests.h"
#include "bindings/result_allocator.h"
#include "bindings/run_ahead.h"
#include "bindings/shared_tensors.h"
#include "collective/make_communicator.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

class PyEngine {
 public:
  PyEngine(World world, std::shared_ptr<ControlPlane> plane, std::uint64_t set,
           std::vector<int> members, const EngineConfig& config, NcclSettings settings,
           std::shared_ptr<LaunchOrder> order, py::function log)
      : pid_(::getpid()),
        rank_(world.topology.rank),
        size_(world.topology.size()),
        hosts_(world.topology.host_count()),
        plane_(std::move(plane)) {
    auto abort = std::make_shared<Abort>();
    // Shared with the engine's thread, which has no GIL.
    const std::shared_ptr<py::function> shared_log(new py::function(std::move(log)),
                                                   [](py::function* function) {
                                                     const py::gil_scoped_acquire gil;
                                                     delete function;
                                                   });
    const auto log_line = [shared_log](const std::string& text) {
      const py::gil_scoped_acquire gil;
      (*shared_log)(text);
    };
    Engine::Options options{config,      world.labels,      plane_.get(), set, std::move(members),
                            world.waits, has_other_threads, log_line,     {},  std::move(order)};
    communicator_ = make_communicator(world, config, *abort);
    shared_.emplace(rank_, communicator_, log_line);
    options.make_device = [device = device_, patience = DevicePatience{config, options.log},
                           labels = world.labels, settings = std::move(settings)](
                              std::uint8_t type, Communicator& host, const Abort& abort) {
      return make_accelerator(*device, static_cast<c10::DeviceType>(type), host, abort, patience,
                              labels, settings);
    };
    // The plane may be telling another engine that a rank is lost, and that engine's thread may
    // need the GIL to end: it frees tensors.
    const py::gil_scoped_release no_gil;
    engine_ = std::make_shared<Engine>(communicator_, abort, std::move(options));
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  ~PyEngine() { shutdown(); }

  PyWork allreduce(const at::Tensor& tensor, const at::Tensor& output, std::string name, int op,
                   double prescale, double postscale, bool blocking) const {
    device_->use(tensor.device());
    return submit(
        allreduce_request(tensor, output, std::move(name), op, prescale, postscale, size_),
        result_in(output), tensor.device(), blocking);
  }

  /// A blocking allreduce without a handle: the shortest path of a small tensor. Returns the
  /// output, which is a new tensor if none is given.
  at::Tensor allreduce_and_wait(const at::Tensor& tensor, std::optional<at::Tensor> output,
                                std::string name, int op, double prescale, double postscale) const {
    const bool in_place = output && output->is_same(tensor);
    if (!output) output = empty_result_like(tensor);
    if (!tensor.is_cpu()) {
      allreduce(tensor, *output, std::move(name), op, prescale, postscale, true).wait();
    } else {
      const std::shared_ptr<Engine> engine = running();
      Request request =
          allreduce_request(tensor, *output, std::move(name), op, prescale, postscale, size_);
      const BlockingCall no_gil;
      engine->submit_and_wait(std::move(request), kCheckSignals);
    }
    if (in_place && !tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();  // autograd then refuses a stale saved tensor
    }
    return *output;
  }

  PyLaunch launch_allreduce(const at::Tensor& tensor, int op, double prescale,
                            double postscale) const {
    device_->use(tensor.device());
    return torch_ring::launch_allreduce(running(), tensor, op, prescale, postscale, size_);
  }

  PyWork broadcast(const at::Tensor& tensor, const at::Tensor& output, int root, std::string name,
                   bool blocking) const {
    device_->use(tensor.device());
    return submit(broadcast_request(tensor, output, root, size_, std::move(name)),
                  result_in(output), tensor.device(), blocking);
  }

  PyWork allgather(const at::Tensor& tensor, std::string name, bool blocking, bool joinable) const {
    device_->use(tensor.device());
    auto result = std::make_shared<Result>();
    return submit(allgather_request(tensor, result, std::move(name), joinable), result,
                  tensor.device(), blocking);
  }

  PyWork alltoall(const at::Tensor& tensor, std::vector<std::int64_t> splits, std::string name,
                  bool blocking) const {
    device_->use(tensor.device());
    auto result = std::make_shared<Result>();
    return submit(alltoall_request(tensor, std::move(splits), result, std::move(name), size_),
                  result, tensor.device(), blocking);
  }

  PyWork reducescatter(const at::Tensor& tensor, const at::Tensor& output, std::string name, int op,
                       double prescale, double postscale, bool blocking) const {
    device_->use(tensor.device());
    return submit(reducescatter_request(tensor, output, std::move(name), op, prescale, postscale,
                                        rank_, size_),
                  result_in(output), tensor.device(), blocking);
  }

  PyWork barrier(std::string name, bool blocking) const {
    return submit(barrier_request(std::move(name)), std::make_shared<Result>(), at::kCPU, blocking);
  }

  PyWork join() const {
    device_->prefer_current();
    auto result = std::make_shared<Result>();
    Request request = join_request(result);
    request.allocate = standing_in(run_ahead_);
    return submit(std::move(request), result, at::kCPU, true);
  }

  std::vector<PyWork> grouped_allreduce(const std::vector<at::Tensor>& tensors,
                                        const std::vector<at::Tensor>& outputs,
                                        const std::string& name, int op, double prescale,
                                        double postscale, bool blocking) const {
    for (const at::Tensor& tensor : tensors) device_->use(tensor.device());
    check_outputs(tensors, outputs);
    std::vector<Member> members;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      members.push_back({allreduce_request(tensors[i], outputs[i], member_name(name, i), op,
                                           prescale, postscale, size_),
                         result_in(outputs[i]), tensors[i].device()});
    }
    return submit(std::move(members), blocking);
  }

  std::vector<PyWork> grouped_allgather(const std::vector<at::Tensor>& tensors,
                                        const std::string& name, bool blocking,
                                        bool joinable) const {
    for (const at::Tensor& tensor : tensors) device_->use(tensor.device());
    std::vector<Member> members;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      auto result = std::make_shared<Result>();
      members.push_back({allgather_request(tensors[i], result, member_name(name, i), joinable),
                         result, tensors[i].device()});
    }
    return submit(std::move(members), blocking);
  }

  std::vector<PyWork> grouped_reducescatter(const std::vector<at::Tensor>& tensors,
                                            const std::vector<at::Tensor>& outputs,
                                            const std::string& name, int op, double prescale,
                                            double postscale, bool blocking) const {
    for (const at::Tensor& tensor : tensors) device_->use(tensor.device());
    check_outputs(tensors, outputs);
    std::vector<Member> members;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      members.push_back({reducescatter_request(tensors[i], outputs[i], member_name(name, i), op,
                                               prescale, postscale, rank_, size_),
                         result_in(outputs[i]), tensors[i].device()});
    }
    return submit(std::move(members), blocking);
  }

  at::Tensor empty_shared(const std::vector<std::int64_t>& shape, py::object dtype) {
    if (!THPDtype_Check(dtype.ptr())) throw py::type_error("dtype must be a torch.dtype");
    const auto options = at::TensorOptions()
                             .dtype(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type)
                             .device(at::kCPU);
    return shared_->empty(shape, options);
  }

  /// Blocks for large gradients of all optimizers of this set. Null where buckets are not in shared
  /// memory, and where they are sent during backward: large buckets keep the network busier.
  std::shared_ptr<BlockPool> gradient_blocks() {
    if (!communicator_ || !has_shared_memory() || overlaps()) return nullptr;
    return shared_->gradient_blocks();
  }

  bool has_shared_memory() const { return size_ > hosts_; }
  bool overlaps() const { return hosts_ > 1; }

  std::optional<py::bytes> finalize_dense(const DenseFinalizer& finalizer, PassAgreement& agreement,
                                          const std::string& report) const {
    const std::shared_ptr<Engine> engine = running();
    std::optional<std::string> gathered;
    {
      const BlockingCall no_gil;
      gathered = finalizer.run(*engine, size_, agreement, report, kCheckSignals);
    }
    if (!gathered) return std::nullopt;
    return py::bytes(*gathered);
  }

  py::bytes gather_reports(PassAgreement& agreement, const std::string& report) const {
    const std::shared_ptr<Engine> engine = running();
    std::string gathered;
    {
      const BlockingCall no_gil;
      gathered = agreement.gather(*engine, report, kCheckSignals);
    }
    return {gathered};
  }

  std::shared_ptr<RunAhead> run_ahead() {
    if (!run_ahead_) run_ahead_ = std::make_shared<RunAhead>(engine_, size_);
    return run_ahead_;
  }

  void end(const std::string& why) const {
    const std::shared_ptr<Engine> engine = running();
    const BlockingCall no_gil;
    engine->end(Error(ErrorKind::kInternal, why));
  }

  void shutdown(bool removed = false) {
    if (::getpid() != pid_) return abandon();
    if (!engine_) return;
    {
      const py::gil_scoped_release no_gil;  // the engine's threads may be about to log
      engine_->close(removed ? Engine::Ending::kRemoved : Engine::Ending::kLeaves);
    }
    engine_.reset();
    communicator_.reset();
  }

  /// In a forked child: leaks the parent's threads, locks and memory without touching them.
  void abandon() {
    if (engine_) new std::shared_ptr<Engine>(std::move(engine_));
    if (communicator_) new std::shared_ptr<HostCommunicator>(std::move(communicator_));
    if (plane_) new std::shared_ptr<ControlPlane>(std::move(plane_));
  }

 private:
  static Engine::Mode mode_of(bool blocking) {
    return blocking ? Engine::Mode::kBlocking : Engine::Mode::kAsynchronous;
  }

  static void check_outputs(const std::vector<at::Tensor>& tensors,
                            const std::vector<at::Tensor>& outputs) {
    if (tensors.size() != outputs.size()) {
      throw Error(ErrorKind::kInvalidArgument, "a group needs an output for each tensor");
    }
  }

  /// A shared reference to the engine: a signal handler may shut it down during a call.
  std::shared_ptr<Engine> running() const {
    if (!engine_) throw Error(ErrorKind::kInternal, "torch_ring was shut down");
    return engine_;
  }

  void prepare(Request& request, Result& result, c10::Device device) const {
    if (request.fingerprint.on_host()) return;
    result.output_event.emplace(device).follow(request);
  }

  PyWork submit(Request request, std::shared_ptr<Result> result, c10::Device device,
                bool blocking) const {
    const std::shared_ptr<Engine> engine = running();
    prepare(request, *result, device);
    std::shared_ptr<Work> work;
    {
      const BlockingCall no_gil;
      work = engine->submit(std::move(request), mode_of(blocking));
    }
    return {engine, std::move(work), std::move(result)};
  }

  std::vector<PyWork> submit(std::vector<Member> members, bool blocking) const {
    const std::shared_ptr<Engine> engine = running();
    std::vector<Request> requests;
    for (Member& member : members) {
      const auto count = static_cast<std::uint32_t>(members.size());
      member.request.fingerprint.group = count > 1 ? count : 0;
      prepare(member.request, *member.result, member.device);
      requests.push_back(std::move(member.request));
    }
    std::vector<std::shared_ptr<Work>> works;
    {
      const BlockingCall no_gil;
      works = engine->submit(std::move(requests), mode_of(blocking));
    }
    std::vector<PyWork> handles;
    for (std::size_t i = 0; i < works.size(); ++i) {
      handles.emplace_back(engine, std::move(works[i]), std::move(members[i].result));
    }
    return handles;
  }

  const pid_t pid_;
  const int rank_;
  const int size_;
  const int hosts_;
  const std::shared_ptr<DeviceChoice> device_ = DeviceChoice::of_process();
  std::shared_ptr<ControlPlane> plane_;  // outlives the engine
  std::shared_ptr<HostCommunicator> communicator_;
  std::shared_ptr<Engine> engine_;
  std::optional<SharedTensors> shared_;
  std::shared_ptr<RunAhead> run_ahead_;
};

std::unique_ptr<PyEngine> make_engine(
    int rank, std::vector<int> members, std::vector<int> host_of, std::vector<std::string> labels,
    bool may_spin, const std::shared_ptr<PyControlPlane>& plane, std::uint64_t set, int width,
    const std::shared_ptr<PyHostMemory>& memory, const std::vector<std::int64_t>& slots,
    std::shared_ptr<LaunchOrder> launch_order, bool checksums, double timeout_s,
    double stall_warning_s, double fusion_window_s, std::size_t fusion_threshold_bytes,
    std::string nccl_library, bool nccl_blocking, py::function log) {
  const std::shared_ptr<ControlPlane> control = plane ? plane->get() : nullptr;
  const EngineConfig config =
      engine_config_of(timeout_s, stall_warning_s, fusion_window_s, fusion_threshold_bytes);
  World world = world_of(rank, members, std::move(host_of), std::move(labels), may_spin, control,
                         set, width, memory, slots, checksums, config);
  return std::make_unique<PyEngine>(std::move(world), control, set, std::move(members), config,
                                    NcclSettings{std::move(nccl_library), nccl_blocking},
                                    std::move(launch_order), std::move(log));
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<PyWork>(module, "Work")
      .def("done", &PyWork::done)
      .def("wait", &PyWork::wait)
      .def("received_splits", &PyWork::received_splits);
  py::class_<PyLaunch>(module, "Launch").def("done", &PyLaunch::done).def("wait", &PyLaunch::wait);
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(module, "BlockPool");
  py::class_<PyEngine>(module, "Engine")
      .def(py::init(&make_engine), py::arg("rank"), py::arg("members"), py::arg("host_of"),
           py::arg("labels"), py::arg("may_spin"), py::arg("plane"), py::arg("number"),
           py::arg("width"), py::arg("memory"), py::arg("slots"), py::arg("launch_order"),
           py::kw_only(), py::arg("checksums"), py::arg("timeout_s"), py::arg("stall_warning_s"),
           py::arg("fusion_window_s"), py::arg("fusion_threshold_bytes"), py::arg("nccl_library"),
           py::arg("nccl_blocking"), py::arg("log"))
      .def("allreduce", &PyEngine::allreduce, py::arg("tensor"), py::arg("output"), py::arg("name"),
           py::arg("op"), py::arg("prescale"), py::arg("postscale"), py::arg("blocking") = false)
      // No keywords: pybind11's look-up of argument names costs as much as a small allreduce.
      .def("allreduce_and_wait", &PyEngine::allreduce_and_wait)
      .def("launch_allreduce", &PyEngine::launch_allreduce, py::arg("tensor"), py::arg("op"),
           py::arg("prescale"), py::arg("postscale"))
      .def("broadcast", &PyEngine::broadcast, py::arg("tensor"), py::arg("output"), py::arg("root"),
           py::arg("name"), py::arg("blocking") = false)
      .def("allgather", &PyEngine::allgather, py::arg("tensor"), py::arg("name"),
           py::arg("blocking") = false, py::arg("joinable") = false)
      .def("alltoall", &PyEngine::alltoall, py::arg("tensor"), py::arg("splits"), py::arg("name"),
           py::arg("blocking") = false)
      .def("reducescatter", &PyEngine::reducescatter, py::arg("tensor"), py::arg("output"),
           py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
           py::arg("blocking") = false)
      .def("barrier", &PyEngine::barrier, py::arg("name"), py::arg("blocking") = false)
      .def("join", &PyEngine::join)
      .def("grouped_allreduce", &PyEngine::grouped_allreduce, py::arg("tensors"),
           py::arg("outputs"), py::arg("name"), py::arg("op"), py::arg("prescale"),
           py::arg("postscale"), py::arg("blocking") = false)
      .def("grouped_allgather", &PyEngine::grouped_allgather, py::arg("tensors"), py::arg("name"),
           py::arg("blocking") = false, py::arg("joinable") = false)
      .def("grouped_reducescatter", &PyEngine::grouped_reducescatter, py::arg("tensors"),
           py::arg("outputs"), py::arg("name"), py::arg("op"), py::arg("prescale"),
           py::arg("postscale"), py::arg("blocking") = false)
      .def("finalize_dense", &PyEngine::finalize_dense)
      .def("gather_reports", &PyEngine::gather_reports)
      .def("run_ahead", &PyEngine::run_ahead)
      .def("end", &PyEngine::end, py::arg("why"))
      .def("empty_shared", &PyEngine::empty_shared, py::arg("shape"), py::arg("dtype"))
      .def("gradient_blocks", &PyEngine::gradient_blocks)
      .def("has_shared_memory", &PyEngine::has_shared_memory)
      .def("overlaps", &PyEngine::overlaps)
      .def("shutdown", &PyEngine::shutdown, py::arg("removed") = false)
      .def("abandon", &PyEngine::abandon);
}

}  // namespace torch_ring
