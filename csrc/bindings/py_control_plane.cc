#include "bindings/py_control_plane.h"

#include <pybind11/stl.h>
#include <sys/stat.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstring>
#include <tuple>

#include "bindings/text.h"
#include "control/news.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

using Address = std::tuple<std::string, std::string, int>;  // socket, host, port

std::unique_ptr<PyControlPlane> make_plane(int rank, std::vector<int> host_of,
                                           std::vector<std::string> labels,
                                           const std::vector<Address>& addresses,
                                           const py::bytes& key, int unix_listener,
                                           int tcp_listener, double heartbeat_timeout_s,
                                           int launcher, std::string launcher_died, int claim) {
  ControlPlane::Options options;
  options.unix_listener = Fd(unix_listener);  // first: owned, so closed on errors
  options.tcp_listener = Fd(tcp_listener);
  options.launcher = Fd(launcher);
  options.claim = Fd(claim);
  options.launcher_died = std::move(launcher_died);
  options.rank = rank;
  options.host_of = std::move(host_of);
  options.labels = std::move(labels);
  for (const auto& [socket, host, port] : addresses) {
    options.addresses.push_back({socket, host, static_cast<std::uint16_t>(port)});
  }
  const std::string bytes = key;
  if (bytes.size() != options.key.size()) throw py::value_error("a key has 32 bytes");
  std::memcpy(options.key.data(), bytes.data(), bytes.size());
  options.heartbeat_timeout =
      std::chrono::milliseconds(static_cast<std::int64_t>(heartbeat_timeout_s * 1000.0));
  return std::make_unique<PyControlPlane>(std::move(options));
}

class OwningSource final : public SocketSource {
 public:
  OwningSource(std::shared_ptr<ControlPlane> plane, std::unique_ptr<SocketSource> source)
      : plane_(std::move(plane)), source_(std::move(source)) {}

  std::vector<Fd> take(int peer, bool needed) override { return source_->take(peer, needed); }

 private:
  const std::shared_ptr<ControlPlane> plane_;
  const std::unique_ptr<SocketSource> source_;
};

}  // namespace

PyControlPlane::PyControlPlane(ControlPlane::Options options)
    : pid_(::getpid()), plane_(std::make_shared<ControlPlane>(std::move(options))) {}

void PyControlPlane::fail(std::uint64_t set, const std::string& why) {
  plane_->fail(set, Error(ErrorKind::kInternal, why));
}

void PyControlPlane::close_set(std::uint64_t set) {
  if (!plane_ || ::getpid() != pid_) return;
  const py::gil_scoped_release no_gil;
  for (const std::uint64_t number : numbers_of(set)) plane_->unsubscribe(number);
}

void PyControlPlane::leave_unused(std::uint64_t set, int members) {
  if (plane_ && ::getpid() == pid_) plane_->leave(set, 0, members);
  close_set(set);  // members that use it may have connected to this one
}

void PyControlPlane::give_reason(std::string why) {
  if (plane_ && ::getpid() == pid_) plane_->give_reason(std::move(why));
}

void PyControlPlane::read_letters(py::function reader) {
  if (!plane_) return;
  const std::shared_ptr<py::function> shared(new py::function(std::move(reader)),
                                             [](py::function* function) {
                                               const py::gil_scoped_acquire gil;
                                               delete function;
                                             });
  plane_->read_letters([shared](const Letter& letter) {
    const py::gil_scoped_acquire gil;
    try {
      (*shared)(letter.is_question, letter.from, letter.number, as_text(letter.text));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("torch_ring: a letter of another rank");
    }
  });
}

void PyControlPlane::stop(std::chrono::milliseconds patience) {
  if (::getpid() != pid_) return abandon();
  if (!plane_) return;
  const py::gil_scoped_release no_gil;
  plane_->stop(patience);
}

void PyControlPlane::before_fork() {
  inherited_.clear();
  if (!plane_) return;
  for (const int fd : plane_->descriptors()) {
    struct stat status{};
    if (::fstat(fd, &status) == 0) inherited_.emplace_back(fd, status.st_ino);
  }
}

void PyControlPlane::abandon() {
  for (const auto& [fd, inode] : inherited_) {
    struct stat status{};
    // The parent may have closed the connection, and another file may have its number now.
    if (::fstat(fd, &status) == 0 && status.st_ino == inode) ::close(fd);
  }
  inherited_.clear();
  if (plane_) new std::shared_ptr<ControlPlane>(std::move(plane_));
}

std::unique_ptr<SocketSource> sockets_of(std::shared_ptr<ControlPlane> plane, std::uint64_t set,
                                         std::vector<int> members, int width) {
  auto source = plane->sockets(set, std::move(members), width);
  return std::make_unique<OwningSource>(std::move(plane), std::move(source));
}

std::shared_ptr<WaitGraph> waits_of(const std::shared_ptr<ControlPlane>& plane, std::uint64_t set,
                                    std::vector<int> members, std::chrono::milliseconds patience) {
  std::shared_ptr<WaitGraph> graph = plane->waits(set, std::move(members), patience);
  WaitGraph* const waits = graph.get();
  return {waits, [plane, graph = std::move(graph)](WaitGraph*) {}};
}

void bind_control_plane(py::module_& module) {
  py::class_<PyControlPlane, std::shared_ptr<PyControlPlane>>(module, "ControlPlane")
      .def(py::init(&make_plane), py::arg("rank"), py::arg("host_of"), py::arg("labels"),
           py::arg("addresses"), py::arg("key"), py::arg("unix_listener"), py::arg("tcp_listener"),
           py::arg("heartbeat_timeout_s"), py::arg("launcher"), py::arg("launcher_died"),
           py::arg("claim"))
      .def("missing", &PyControlPlane::missing)
      .def("trouble", &PyControlPlane::trouble)
      .def("fail", &PyControlPlane::fail, py::arg("number"), py::arg("why"))
      .def("close_set", &PyControlPlane::close_set, py::arg("number"))
      .def("leave_unused", &PyControlPlane::leave_unused, py::arg("number"), py::arg("members"))
      .def("has_ended", &PyControlPlane::has_ended, py::arg("number"))
      .def("give_reason", &PyControlPlane::give_reason, py::arg("why"))
      .def("lost", &PyControlPlane::lost)
      .def("ask", &PyControlPlane::ask, py::arg("rank"))
      .def("answer", &PyControlPlane::answer, py::arg("rank"), py::arg("number"), py::arg("text"))
      .def("read_letters", &PyControlPlane::read_letters, py::arg("reader"))
      .def("connections", &PyControlPlane::connections)
      .def(
          "stop",
          [](PyControlPlane& plane, double patience_s) {
            plane.stop(std::chrono::milliseconds(static_cast<std::int64_t>(patience_s * 1000.0)));
          },
          py::arg("patience_s"))
      .def("before_fork", &PyControlPlane::before_fork)
      .def("abandon", &PyControlPlane::abandon);
}

}  // namespace torch_ring
