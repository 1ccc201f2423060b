#include "bindings/py_engine.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>

#include <utility>

#include "bindings/blocking_call.h"
#include "bindings/py_world.h"
#include "bindings/requests.h"
#include "bindings/spans.h"
#include "collective/make_communicator.h"

namespace py = pybind11;

namespace torch_ring {

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

namespace {

/// Whether Python has threads beside this one, which may still submit something.
bool has_other_threads() {
  const py::gil_scoped_acquire gil;
  PyThreadState* const first = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  return PyThreadState_Next(first) != nullptr;
}

Engine::Mode mode_of(bool blocking) {
  return blocking ? Engine::Mode::kBlocking : Engine::Mode::kAsynchronous;
}

void check_outputs(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& outputs) {
  if (tensors.size() != outputs.size()) {
    throw Error(ErrorKind::kInvalidArgument, "a group needs an output for each tensor");
  }
}

}  // namespace

PyEngine::PyEngine(World world, std::shared_ptr<ControlPlane> plane, std::uint64_t set,
                   std::vector<int> members, const EngineConfig& config, NcclSettings settings,
                   std::shared_ptr<LaunchOrder> order, py::function log)
    : rank_(world.topology.rank),
      size_(world.topology.size()),
      hosts_(world.topology.host_count()),
      set_(set),
      timeout_(config.timeout),
      transport_(transport_among(size_, hosts_)),
      plane_(std::move(plane)) {
  auto abort = std::make_shared<Abort>();
  // Shared with the engine's thread, which does not hold the GIL.
  const std::shared_ptr<py::function> shared_log(new py::function(std::move(log)),
                                                 [](py::function* function) {
                                                   const py::gil_scoped_acquire gil;
                                                   delete function;
                                                 });
  const auto log_line = [shared_log](const std::string& text) {
    const py::gil_scoped_acquire gil;
    try {
      (*shared_log)(as_text(text));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a log handler of torch_ring");
    }
  };
  if (plane_) {
    messages_ = std::make_shared<PointToPoint>(
        *plane_, set, members,
        MessagesWorld{rank_, world.labels, world.width, world.checksums, config.transfer_timeout(),
                      config.stall_warning, log_line, config.timeout_name, config.words.leave,
                      message_recorder_});
  }
  Engine::Options options{config,      world.labels,      plane_.get(), set, std::move(members),
                          world.waits, has_other_threads, log_line,     {},  std::move(order)};
  options.transport = transport_;
  options.follow = [group = SpanGroup{set_, rank_, size_, name_of(transport_)}](Request& request) {
    follow_with_span(request, group);
  };
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

PyWork PyEngine::allreduce(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                           int op, double prescale, double postscale, bool blocking) const {
  device_->use(tensor.device());
  return submit(allreduce_request(tensor, output, std::move(name), op, prescale, postscale, size_),
                result_in(output), tensor.device(), blocking);
}

at::Tensor PyEngine::allreduce_and_wait(const at::Tensor& tensor, std::optional<at::Tensor> output,
                                        std::string name, int op, double prescale,
                                        double postscale) const {
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
    tensor.unsafeGetTensorImpl()->bump_version();  // so autograd refuses a stale saved tensor
  }
  return *output;
}

PyWork PyEngine::broadcast(const at::Tensor& tensor, const at::Tensor& output, int root,
                           std::string name, bool blocking) const {
  device_->use(tensor.device());
  return submit(broadcast_request(tensor, output, root, size_, std::move(name)), result_in(output),
                tensor.device(), blocking);
}

PyWork PyEngine::allgather(const at::Tensor& tensor, std::string name, bool blocking,
                           bool joinable) const {
  device_->use(tensor.device());
  auto result = std::make_shared<Result>();
  return submit(allgather_request(tensor, result, std::move(name), joinable), result,
                tensor.device(), blocking);
}

PyWork PyEngine::alltoall(const at::Tensor& tensor, std::vector<std::int64_t> splits,
                          std::string name, bool blocking) const {
  device_->use(tensor.device());
  auto result = std::make_shared<Result>();
  return submit(alltoall_request(tensor, std::move(splits), result, std::move(name), size_), result,
                tensor.device(), blocking);
}

PyWork PyEngine::reducescatter(const at::Tensor& tensor, const at::Tensor& output, std::string name,
                               int op, double prescale, double postscale, bool blocking) const {
  device_->use(tensor.device());
  return submit(
      reducescatter_request(tensor, output, std::move(name), op, prescale, postscale, rank_, size_),
      result_in(output), tensor.device(), blocking);
}

PyWork PyEngine::reduce(const at::Tensor& tensor, int root, std::string name, int op,
                        double prescale, double postscale, std::optional<at::Tensor> output,
                        bool blocking) const {
  device_->use(tensor.device());
  const at::Tensor target = rank_ != root ? at::Tensor()
                            : output      ? *output
                                          : empty_result_like(tensor);
  return submit(
      reduce_request(tensor, target, root, std::move(name), op, prescale, postscale, size_),
      result_in(target), tensor.device(), blocking);
}

PyWork PyEngine::gather(const at::Tensor& tensor, int root, std::string name,
                        std::optional<at::Tensor> output, bool blocking) const {
  device_->use(tensor.device());
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), size_);
  const at::Tensor target = rank_ != root ? at::Tensor()
                            : output      ? *output
                                          : empty_result(tensor, shape);
  return submit(gather_request(tensor, target, root, std::move(name), size_), result_in(target),
                tensor.device(), blocking);
}

PyWork PyEngine::scatter(const at::Tensor& output, int root, std::string name,
                         std::optional<at::Tensor> tensor, bool blocking) const {
  device_->use(output.device());
  if (rank_ == root && !tensor) {
    throw Error(ErrorKind::kInvalidArgument, "scatter: the root must give the tensor of all parts");
  }
  const at::Tensor parts = rank_ == root ? *tensor : at::Tensor();
  return submit(scatter_request(parts, output, root, std::move(name), size_), result_in(output),
                output.device(), blocking);
}

PyWork PyEngine::barrier(std::string name, bool blocking, bool reset) const {
  return submit(barrier_request(std::move(name), reset), std::make_shared<Result>(), at::kCPU,
                blocking);
}

PyWork PyEngine::join() const {
  device_->prefer_current();
  auto result = std::make_shared<Result>();
  Request request = join_request(result);
  request.allocate = stand_in_;
  return submit(std::move(request), result, at::kCPU, true);
}

std::vector<PyWork> PyEngine::grouped_allreduce(const std::vector<at::Tensor>& tensors,
                                                const std::vector<at::Tensor>& outputs,
                                                const std::string& name, int op, double prescale,
                                                double postscale, bool blocking) const {
  for (const at::Tensor& tensor : tensors) device_->use(tensor.device());
  check_outputs(tensors, outputs);
  std::vector<GroupedRequest> members;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    members.push_back({allreduce_request(tensors[i], outputs[i], member_name(name, i), op, prescale,
                                         postscale, size_),
                       result_in(outputs[i]), tensors[i].device()});
  }
  return submit(std::move(members), blocking);
}

std::vector<PyWork> PyEngine::grouped_allgather(const std::vector<at::Tensor>& tensors,
                                                const std::string& name, bool blocking,
                                                bool joinable) const {
  for (const at::Tensor& tensor : tensors) device_->use(tensor.device());
  std::vector<GroupedRequest> members;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto result = std::make_shared<Result>();
    members.push_back({allgather_request(tensors[i], result, member_name(name, i), joinable),
                       result, tensors[i].device()});
  }
  return submit(std::move(members), blocking);
}

std::vector<PyWork> PyEngine::grouped_reducescatter(const std::vector<at::Tensor>& tensors,
                                                    const std::vector<at::Tensor>& outputs,
                                                    const std::string& name, int op,
                                                    double prescale, double postscale,
                                                    bool blocking) const {
  for (const at::Tensor& tensor : tensors) device_->use(tensor.device());
  check_outputs(tensors, outputs);
  std::vector<GroupedRequest> members;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    members.push_back({reducescatter_request(tensors[i], outputs[i], member_name(name, i), op,
                                             prescale, postscale, rank_, size_),
                       result_in(outputs[i]), tensors[i].device()});
  }
  return submit(std::move(members), blocking);
}

std::shared_ptr<MessageRequest> PyEngine::send(const at::Tensor& tensor, int destination, int tag,
                                               std::optional<Clock::time_point> deadline) const {
  return post(send_spec(tensor, destination, tag), deadline);
}

std::shared_ptr<MessageRequest> PyEngine::receive(const at::Tensor& tensor,
                                                  std::optional<int> source, int tag,
                                                  std::optional<Clock::time_point> deadline) const {
  return post(receive_spec(tensor, source, tag), deadline);
}

std::shared_ptr<MessageRequest> PyEngine::post(MessageSpec spec,
                                               std::optional<Clock::time_point> deadline) const {
  if (!messages_) throw Error(ErrorKind::kInvalidArgument, "a message needs another rank");
  if (deadline) {
    spec.deadline = *deadline;
  } else if (timeout_.count() > 0) {
    spec.deadline = Clock::now() + timeout_;
  }
  return messages_->post(std::move(spec));
}

at::Tensor PyEngine::empty_shared(const std::vector<std::int64_t>& shape, py::object dtype) const {
  if (!THPDtype_Check(dtype.ptr())) throw py::type_error("dtype must be a torch.dtype");
  const auto options = at::TensorOptions()
                           .dtype(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type)
                           .device(at::kCPU);
  return empty_shared(shape, options);
}

at::Tensor PyEngine::empty_shared(const std::vector<std::int64_t>& shape,
                                  at::TensorOptions options) const {
  return shared_->empty(shape, options);
}

std::shared_ptr<BlockPool> PyEngine::gradient_blocks() {
  if (!communicator_ || !has_shared_memory() || overlaps()) return nullptr;
  return shared_->gradient_blocks();
}

std::vector<OperationRecord> PyEngine::records() const {
  const std::shared_ptr<Engine> engine = engine_;
  const py::gil_scoped_release no_gil;
  return engine ? engine->records() : std::vector<OperationRecord>{};
}

OperationTotals PyEngine::totals() const {
  const std::shared_ptr<Engine> engine = engine_;
  const py::gil_scoped_release no_gil;
  return engine ? engine->totals() : OperationTotals{};
}

void PyEngine::observe(std::shared_ptr<RecordStream> stream) const {
  const std::shared_ptr<Engine> engine = running();
  const py::gil_scoped_release no_gil;
  engine->observe(std::move(stream));
}

void PyEngine::end(const std::string& why) const {
  const std::shared_ptr<Engine> engine = running();
  const BlockingCall no_gil;
  engine->end(Error(ErrorKind::kInternal, why));
}

void PyEngine::shutdown(bool removed, std::string why) {
  if (!home_.is_here()) return abandon();
  if (!engine_) return;
  const std::shared_ptr<Engine> engine = engine_;  // another thread may be here, too
  const std::shared_ptr<HostCommunicator> communicator = communicator_;
  {
    const py::gil_scoped_release no_gil;  // the engine's threads may be about to log
    if (messages_) messages_->close();
    engine->close(removed ? Engine::Ending::kRemoved : Engine::Ending::kLeaves, std::move(why));
  }
  engine_.reset();
  communicator_.reset();
}

void PyEngine::abandon() {
  if (engine_) new std::shared_ptr<Engine>(std::move(engine_));
  if (communicator_) new std::shared_ptr<HostCommunicator>(std::move(communicator_));
  if (messages_) new std::shared_ptr<PointToPoint>(messages_);
  if (plane_) new std::shared_ptr<ControlPlane>(std::move(plane_));
}

std::shared_ptr<Engine> PyEngine::running() const {
  if (!engine_) throw Error(ErrorKind::kInternal, "torch_ring was shut down");
  return engine_;
}

PyWork PyEngine::submit(Request request, std::shared_ptr<Result> result, c10::Device device,
                        bool blocking) const {
  const std::shared_ptr<Engine> engine = running();
  if (!request.fingerprint.on_host()) {
    result->output_event.emplace(device, recorded_now(device)).follow(request);
  }
  std::shared_ptr<Work> work;
  {
    const BlockingCall no_gil;
    work = engine->submit(std::move(request), mode_of(blocking));
  }
  return {engine, std::move(work), std::move(result)};
}

std::vector<PyWork> PyEngine::submit(std::vector<GroupedRequest> members, bool blocking) const {
  const std::shared_ptr<Engine> engine = running();
  std::vector<Request> requests;
  std::shared_ptr<c10::Event> ready;  // of all
  for (GroupedRequest& member : members) {
    const auto count = static_cast<std::uint32_t>(members.size());
    member.request.fingerprint.group = count > 1 ? count : 0;
    if (!member.request.fingerprint.on_host()) {
      if (!ready) ready = recorded_now(member.device);
      member.result->output_event.emplace(member.device, ready).follow(member.request);
    }
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

}  // namespace torch_ring
