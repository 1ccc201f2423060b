// SPDX-License-Identifier: Apache-2.0
#include "bindings/py_world.h"

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "control/news.h"
#include "core/at.h"
#include "core/error.h"
#include "transport/host_memory.h"
#include "ucx/loader.h"
#include "ucx/stream.h"

namespace py = pybind11;

namespace torch_ring {

py::str as_text(std::string_view bytes) {
  PyObject* const text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

namespace {

int index_of(std::span<const int> ranks, int rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  if (found == ranks.end()) {
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank) + " is not on this host");
  }
  return static_cast<int>(found - ranks.begin());
}

int make_memory(int ranks, const py::bytes& table, std::size_t most_bytes) {
  const auto bytes = static_cast<std::string_view>(table);
  const std::size_t arena = HostMemory::arena_bytes(ranks, HostMemory::machine_bytes(), most_bytes);
  return HostMemory::create(ranks, std::as_bytes(std::span(bytes)), arena).release();
}

py::bytes memory_table(int fd) {
  const std::vector<std::byte> table = HostMemory::read_table(fd);
  return {reinterpret_cast<const char*>(table.data()), table.size()};
}

}  // namespace

PyHostMemory::PyHostMemory(Fd memory, std::vector<int> ranks, int rank)
    : ranks_(std::move(ranks)), host_(std::make_shared<HostMemory>(std::move(memory))) {
  if (host_->ranks() != static_cast<int>(ranks_.size())) {
    throw Error(ErrorKind::kInternal, "the memory of the host is for " +
                                          std::to_string(host_->ranks()) + " ranks, not for " +
                                          std::to_string(ranks_.size()));
  }
  for (int i = 0; i < host_->ranks(); ++i) {
    memories_.push_back(std::make_shared<const SharedMemory>(host_, i));
  }
  arena_ = std::make_shared<SharedArena>(at(memories_, index_of(ranks_, rank)));
}

void PyHostMemory::use(World& world, std::span<const int> members,
                       std::span<const std::int64_t> offsets) const {
  if (world.topology.host_count() == world.topology.size()) return;  // no two ranks share a host
  for (const int rank : world.topology.ranks_of_host(world.topology.host())) {
    world.slots.push_back({at(memories_, index_of(ranks_, at(members, rank))),
                           static_cast<std::size_t>(at(offsets, rank))});
  }
  world.arena = arena_;
}

void bind_host_memory(py::module_& module) {
  module.def("make_memory", &make_memory, py::arg("ranks"), py::arg("table"),
             py::arg("most_bytes"));
  module.def("least_memory", &HostMemory::least_bytes, py::arg("ranks"));
  module.def("mappable_bytes", &HostMemory::mappable_bytes);
  module.def("memory_table", &memory_table, py::arg("fd"));
  py::class_<PyHostMemory, std::shared_ptr<PyHostMemory>>(module, "HostMemory")
      .def(py::init([](int fd, std::vector<int> ranks, int rank) {
             return std::make_shared<PyHostMemory>(Fd(fd), std::move(ranks), rank);
           }),
           py::arg("fd"), py::arg("ranks"), py::arg("rank"))
      .def("reserve_slot", &PyHostMemory::reserve_slot)
      .def("release_slot", &PyHostMemory::release_slot, py::arg("offset"))
      .def("used_bytes", &PyHostMemory::used_bytes)
      .def("abandon", &PyHostMemory::abandon);
}

namespace {

using Address = std::tuple<std::string, std::vector<std::pair<std::string, int>>>;  // socket, TCP

Fd copy_of(int fd) {
  if (fd < 0) return {};
  Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) throw_errno("fcntl(F_DUPFD_CLOEXEC)");
  return copy;
}

std::unique_ptr<PyControlPlane> make_plane(int rank, std::vector<int> host_of,
                                           std::vector<std::string> labels,
                                           const std::vector<Address>& addresses,
                                           const py::bytes& key, int unix_listener,
                                           const std::vector<int>& tcp_listeners,
                                           double heartbeat_timeout_s, int launcher,
                                           std::string launcher_died, bool tls) {
  ControlPlane::Options options;
  options.launcher = Fd(launcher);  // first: owned, so closed on errors
  options.unix_listener = copy_of(unix_listener);
  for (const int fd : tcp_listeners) options.tcp_listeners.push_back(copy_of(fd));
  options.launcher_died = std::move(launcher_died);
  options.rank = rank;
  options.host_of = std::move(host_of);
  options.labels = std::move(labels);
  for (const auto& [socket, tcp] : addresses) {
    auto& address = options.addresses.emplace_back();
    address.socket = socket;
    for (const auto& [host, port] : tcp) {
      address.tcp.push_back({host, static_cast<std::uint16_t>(port)});
    }
  }
  const std::string bytes = key;
  if (bytes.size() != options.key.size()) throw py::value_error("a key has 32 bytes");
  std::memcpy(options.key.data(), bytes.data(), bytes.size());
  if (tls) options.tls = std::make_shared<TlsContext>(options.key);
  options.heartbeat_timeout =
      std::chrono::milliseconds(static_cast<std::int64_t>(heartbeat_timeout_s * 1000.0));
  return std::make_unique<PyControlPlane>(std::move(options));
}

class OwningSource final : public SocketSource {
 public:
  OwningSource(std::shared_ptr<ControlPlane> plane, std::unique_ptr<SocketSource> source)
      : plane_(std::move(plane)), source_(std::move(source)) {}

  std::vector<Socket> take(int peer, bool needed) override { return source_->take(peer, needed); }
  std::string trouble(int peer) const override { return source_->trouble(peer); }

 private:
  const std::shared_ptr<ControlPlane> plane_;
  const std::unique_ptr<SocketSource> source_;
};

}  // namespace

PyControlPlane::PyControlPlane(ControlPlane::Options options)
    : plane_(std::make_shared<ControlPlane>(std::move(options))) {}

void PyControlPlane::fail(std::uint64_t set, const std::string& why) {
  plane_->fail(set, Error(ErrorKind::kInternal, why));
}

void PyControlPlane::close_set(std::uint64_t set) {
  if (!plane_ || !home_.is_here()) return;
  const py::gil_scoped_release no_gil;
  for (const std::uint64_t number : numbers_of(set)) plane_->unsubscribe(number);
}

void PyControlPlane::leave_unused(std::uint64_t set, int members, std::string why) {
  if (plane_ && home_.is_here()) plane_->leave(set, 0, members, std::move(why));
  close_set(set);  // members that use it may have connected to this rank
}

void PyControlPlane::read_queries(py::function reader) {
  if (!plane_) return;
  const std::shared_ptr<py::function> shared(new py::function(std::move(reader)),
                                             [](py::function* function) {
                                               const py::gil_scoped_acquire gil;
                                               delete function;
                                             });
  plane_->read_queries([shared](const Query& query) {
    const py::gil_scoped_acquire gil;
    try {
      (*shared)(query.is_question, query.from, query.number, as_text(query.text));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("torch_ring: a query of another rank");
    }
  });
}

void PyControlPlane::stop(std::chrono::milliseconds patience, std::string why) {
  if (!home_.is_here()) return abandon();
  if (!plane_) return;
  const py::gil_scoped_release no_gil;
  plane_->stop(patience, std::move(why));
}

void PyControlPlane::abandon() {
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
           py::arg("addresses"), py::arg("key"), py::arg("unix_listener"), py::arg("tcp_listeners"),
           py::arg("heartbeat_timeout_s"), py::arg("launcher"), py::arg("launcher_died"),
           py::arg("tls"))
      .def("missing", &PyControlPlane::missing)
      .def("trouble", &PyControlPlane::trouble)
      .def("fail", &PyControlPlane::fail, py::arg("number"), py::arg("why"))
      .def("close_set", &PyControlPlane::close_set, py::arg("number"))
      .def("leave_unused", &PyControlPlane::leave_unused, py::arg("number"), py::arg("members"),
           py::arg("why"))
      .def("has_ended", &PyControlPlane::has_ended, py::arg("number"))
      .def("lost", &PyControlPlane::lost)
      .def("ask", &PyControlPlane::ask, py::arg("rank"))
      .def("answer", &PyControlPlane::answer, py::arg("rank"), py::arg("number"), py::arg("text"))
      .def("read_queries", &PyControlPlane::read_queries, py::arg("reader"))
      .def("want_stop", &PyControlPlane::want_stop, py::arg("signal"))
      .def("pass_point", &PyControlPlane::pass_point)
      .def("why_stop", [](const PyControlPlane& plane) { return as_text(plane.why_stop()); })
      .def("connections", &PyControlPlane::connections)
      .def("cipher", &PyControlPlane::cipher)
      .def(
          "stop",
          [](PyControlPlane& plane, double patience_s, std::string why) {
            plane.stop(std::chrono::milliseconds(static_cast<std::int64_t>(patience_s * 1000.0)),
                       std::move(why));
          },
          py::arg("patience_s"), py::arg("why"))
      .def("abandon", &PyControlPlane::abandon);
}

namespace {

void read(const py::object& value, std::chrono::milliseconds& field) {
  const auto ms = static_cast<std::int64_t>(std::ceil(value.cast<double>() * 1000.0));
  field = std::chrono::milliseconds(ms);
}

void read(const py::object& value, std::chrono::microseconds& field) {
  field = std::chrono::microseconds(static_cast<std::int64_t>(value.cast<double>() * 1e6));
}

template <class Field>
void read(const py::object& value, Field& field) {
  field = value.cast<Field>();
}

void read(const py::object& value, Words& words) {
  words.for_each([&](const char* name, std::string& word) { read(value.attr(name), word); });
}

}  // namespace

EngineConfig engine_config_of(const py::object& config) {
  EngineConfig found;
  found.for_each([&](const char* name, auto& field) { read(config.attr(name), field); });
  return found;
}

World world_of(int rank, const std::vector<int>& members, std::vector<int> host_of,
               std::vector<std::string> labels, bool may_spin,
               const std::shared_ptr<ControlPlane>& plane, std::uint64_t set,
               const std::shared_ptr<PyHostMemory>& memory, const std::vector<std::int64_t>& slots,
               const std::optional<std::string>& ucx_library, const EngineConfig& config) {
  World world;
  world.topology = {rank, std::move(host_of)};
  if (members.size() != world.topology.host_of.size()) {
    throw pybind11::value_error("host_of does not name every rank");
  }
  world.labels = std::move(labels);
  world.may_spin = may_spin;
  world.width = static_cast<std::size_t>(config.width);
  world.checksums = config.checksum != 0;
  if (memory) memory->use(world, members, slots);
  if (plane) {
    world.sockets = sockets_of(plane, set, members, config.width);
    world.waits = waits_of(plane, set, members, config.patience());
    if (ucx_library && world.topology.host_count() > 1) {
      world.network =
          std::make_shared<ucx::UcxNetwork>(ucx::load(*ucx_library), plane->key(), rank);
    }
  }
  return world;
}

}  // namespace torch_ring
