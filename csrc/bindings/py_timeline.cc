// SPDX-License-Identifier: Apache-2.0
#include "bindings/py_timeline.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <numeric>
#include <utility>

#include "bindings/py_world.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

std::unique_ptr<PyTimeline> make_timeline(int rank, std::vector<std::string> labels,
                                          const std::shared_ptr<PyControlPlane>& plane,
                                          std::uint64_t number, std::size_t width, bool checksums,
                                          double transfer_timeout_s, bool has_clock_of_rank_0,
                                          std::string path, bool mark_cycles, py::function log) {
  const std::shared_ptr<py::function> shared_log(new py::function(std::move(log)),
                                                 [](py::function* function) {
                                                   const py::gil_scoped_acquire gil;
                                                   delete function;
                                                 });
  MessagesWorld world;
  world.rank = rank;
  world.labels = labels;
  world.width = width;
  world.checksums = checksums;
  world.transfer_timeout =
      std::chrono::milliseconds(static_cast<std::int64_t>(transfer_timeout_s * 1000.0));
  Timeline::Options options;
  options.rank = rank;
  options.labels = std::move(labels);
  options.has_clock_of_rank_0 = has_clock_of_rank_0;
  options.path = std::move(path);
  options.mark_cycles = mark_cycles;
  options.log = [shared_log](const std::string& text) {
    const py::gil_scoped_acquire gil;
    (*shared_log)(text);
  };
  return std::make_unique<PyTimeline>(std::move(options), plane ? plane->get() : nullptr, number,
                                      std::move(world));
}

}  // namespace

PyTimeline::PyTimeline(Timeline::Options options, std::shared_ptr<ControlPlane> plane,
                       std::uint64_t number, MessagesWorld world)
    : plane_(std::move(plane)) {
  std::unique_ptr<PointToPoint> messages;
  if (plane_) {
    std::vector<int> members(world.labels.size());
    std::iota(members.begin(), members.end(), 0);
    messages = std::make_unique<PointToPoint>(*plane_, kTimelineSet + number, std::move(members),
                                              std::move(world));
  }
  const py::gil_scoped_release no_gil;  // the thread of the messages may log
  timeline_ = std::make_unique<Timeline>(std::move(options), std::move(messages));
}

PyTimeline::~PyTimeline() {
  if (home_.is_here()) {
    stop(0.0);
    return;
  }
  (void)timeline_.release();  // its thread is the parent's
  new std::shared_ptr<ControlPlane>(std::move(plane_));
}

void PyTimeline::watch(std::shared_ptr<RecordStream> stream) {
  if (timeline_ && home_.is_here()) timeline_->watch(std::move(stream));
}

void PyTimeline::stop(double patience_s) {
  if (!timeline_ || !home_.is_here()) return;
  std::unique_ptr<Timeline> timeline = std::move(timeline_);
  const py::gil_scoped_release no_gil;
  timeline->stop(std::chrono::milliseconds(static_cast<std::int64_t>(patience_s * 1000.0)));
  dropped_ = timeline->dropped();
  timeline.reset();
}

void bind_timeline(py::module_& module) {
  py::class_<PyTimeline>(module, "Timeline")
      .def(py::init(&make_timeline), py::kw_only(), py::arg("rank"), py::arg("labels"),
           py::arg("plane"), py::arg("number"), py::arg("width"), py::arg("checksums"),
           py::arg("transfer_timeout_s"), py::arg("has_clock_of_rank_0"), py::arg("path"),
           py::arg("mark_cycles"), py::arg("log"))
      .def("watch", &PyTimeline::watch, py::arg("stream"))
      .def("dropped", &PyTimeline::dropped)
      .def("stop", &PyTimeline::stop, py::arg("patience_s"));
}

}  // namespace torch_ring
