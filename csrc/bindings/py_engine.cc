// SPDX-License-Identifier: Apache-2.0
#include "bindings/py_engine.h"

#include <ATen/ops/empty.h>
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

std::shared_ptr<Result> result_in(const at::Tensor& output) {
  return std::make_shared<Result>(Result{output, {}});
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

PyEngine::Submission PyEngine::submission_of(Fingerprint&& asked, at::Tensor tensor,
                                             at::Tensor output,
                                             std::vector<std::int64_t> splits) const {
  const CollectiveTraits& traits = traits_of(asked.collective);
  if (traits.sends == Sends::kNothing) {
    return {Request{.fingerprint = std::move(asked)}};
  }
  const Place place{rank_, size_};
  const bool scatters = traits.sends == Sends::kOfRootForEach;
  const at::Tensor& own = scatters ? output : tensor;
  if (!own.defined()) refuse(traits.name + std::string(": a tensor is missing"));
  const c10::Device device = own.device();
  device_->use(device);
  if (has_rows(asked.collective)) {
    auto result = std::make_shared<Result>();
    return {request_of_rows(std::move(asked), tensor, std::move(splits), result, size_), device,
            at::Tensor(), result};
  }
  const bool is_root = !traits.has_root || asked.root == rank_;
  if (scatters) {
    if (!is_root) tensor.reset();
    if (is_root && !tensor.defined()) refuse("scatter: the root must give the tensor of all parts");
  } else if (!is_root && traits.sends == Sends::kTensor) {
    output.reset();
  } else if (!output.defined()) {
    output = output_for(asked.collective, tensor, place);
  }
  return {request_of(std::move(asked), tensor, output, place), device, output};
}

PyWork PyEngine::submit(Fingerprint&& asked, at::Tensor tensor, at::Tensor output,
                        std::vector<std::int64_t> splits, bool blocking) const {
  return submit(
      submission_of(std::move(asked), std::move(tensor), std::move(output), std::move(splits)),
      blocking);
}

std::vector<PyWork> PyEngine::submit_group(const Fingerprint& asked,
                                           const std::vector<at::Tensor>& tensors,
                                           const std::vector<at::Tensor>& outputs,
                                           bool blocking) const {
  if (!outputs.empty() && outputs.size() != tensors.size()) {
    refuse("a group needs an output for each tensor");
  }
  std::vector<Submission> members;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Fingerprint member = asked;
    if (!asked.name.empty()) member.name += "." + std::to_string(i);
    if (tensors.size() > 1) member.group = static_cast<std::uint32_t>(tensors.size());
    members.push_back(submission_of(std::move(member), tensors[i],
                                    outputs.empty() ? at::Tensor() : outputs[i], {}));
  }
  const std::shared_ptr<Engine> engine = running();
  std::vector<Request> requests;
  std::shared_ptr<c10::Event> ready;  // of all
  for (auto& [request, device, output, result] : members) {
    if (!result) result = result_in(output);
    if (!request.fingerprint.on_host()) {
      if (!ready) ready = recorded_now(device);
      result->output_event.emplace(device, ready).follow(request);
    }
    requests.push_back(std::move(request));
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

at::Tensor PyEngine::run(Fingerprint&& asked, const at::Tensor& tensor,
                         const at::Tensor& output) const {
  const bool in_place = output.defined() && output.is_same(tensor);
  std::vector<std::int64_t> splits;
  if (traits_of(asked.collective).sends == Sends::kRowsForEach && tensor.defined() &&
      tensor.dim() > 0) {
    splits.assign(static_cast<std::size_t>(size_), tensor.size(0) / size_);
  }
  Submission all = submission_of(std::move(asked), tensor, output, std::move(splits));
  const std::shared_ptr<Result> result = all.result;
  at::Tensor made = all.output;
  if (all.device.is_cpu()) {
    const std::shared_ptr<Engine> engine = running();
    const BlockingCall no_gil;
    engine->submit_and_wait(std::move(all.request), kCheckSignals);
  } else {
    submit(std::move(all), true).wait();
  }
  if (in_place && !tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();  // so autograd refuses a stale saved tensor
  }
  return result ? result->tensor : made;
}

PyWork PyEngine::join() const {
  device_->prefer_current();
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
  auto result = result_in(at::empty({}, options));
  Request request{.fingerprint = {.collective = Collective::kJoin, .name = kJoinKey}};
  request.output = result->tensor.mutable_data_ptr();
  request.finish = [result] {};  // keeps it alive
  request.allocate = stand_in_;
  return submit({std::move(request), at::kCPU, at::Tensor(), result}, true);
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

PyWork PyEngine::submit(Submission submission, bool blocking) const {
  const std::shared_ptr<Engine> engine = running();
  auto& [request, device, output, result] = submission;
  if (!result) result = result_in(output);
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

}  // namespace torch_ring
