// SPDX-License-Identifier: Apache-2.0
#include "bindings/store_call.h"

#include <netdb.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/blocking_call.h"
#include "core/error.h"

namespace py = pybind11;

namespace torch_ring {

namespace {

/// A call that its caller can give up. torch's stores wait for their server, and the system for a
/// host's address, without a deadline of ours, and no signal interrupts them. So each call has a
/// thread without Python: after it is given up, the thread sleeps until the server answers or the
/// process ends, and disturbs neither a fork nor the end of the interpreter.
///
/// Thread: one at a time. Blocking: wait().
class StoreCall {
 public:
  using Bytes = std::vector<std::uint8_t>;
  using Result =
      std::variant<std::monostate, bool, std::int64_t, Bytes, c10::intrusive_ptr<c10d::Store>>;

  /// Begins `call`, which must own all that it uses. Errors: std::system_error if there is no
  /// thread for it.
  explicit StoreCall(std::function<Result()> call);

  /// Whether the call has ended; waits for it for `time` at most.
  bool wait(std::chrono::duration<double> time) const;

  /// Its result. Call it once, after the call has ended. Errors: those of the call.
  Result result();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

struct StoreCall::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  Result result;
  std::exception_ptr error;
};

StoreCall::StoreCall(std::function<Result()> call) : state_(std::make_shared<State>()) {
  std::thread([state = state_, call = std::move(call)]() mutable {
    Result result;
    std::exception_ptr error;
    try {
      result = call();
    } catch (...) {
      error = std::current_exception();
    }
    call = nullptr;  // from now on the caller may be the last owner of the store, and close it
    const std::scoped_lock lock(state->mutex);
    state->result = std::move(result);
    state->error = std::move(error);
    state->ended = true;
    state->changed.notify_all();
  }).detach();
}

bool StoreCall::wait(std::chrono::duration<double> time) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, time, [&] { return state_->ended; });
}

StoreCall::Result StoreCall::result() {
  const std::scoped_lock lock(state_->mutex);
  if (!state_->ended) throw Error(ErrorKind::kInternal, "the store has not answered yet");
  if (const auto error = std::exchange(state_->error, nullptr)) std::rethrow_exception(error);
  return std::move(state_->result);
}

using Store = c10::intrusive_ptr<c10d::Store>;

StoreCall::Bytes to_bytes(const py::bytes& bytes) {
  const auto view = static_cast<std::string_view>(bytes);
  return {view.begin(), view.end()};
}

StoreCall connect_tcp_store(std::string host, std::uint16_t port, double timeout_s) {
  return StoreCall([host = std::move(host), port, timeout_s] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000));
    return StoreCall::Result(Store(c10::make_intrusive<c10d::TCPStore>(host, options)));
  });
}

/// `listening`: a listening socket, which the store then owns; none: the store makes one.
StoreCall serve_tcp_store(std::string host, std::uint16_t port, double timeout_s,
                          std::optional<int> listening) {
  return StoreCall([host = std::move(host), port, timeout_s, listening] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = true;
    options.waitWorkers = false;
    options.multiTenant = true;  // torch.distributed may serve the same address in this process
    options.masterListenFd = listening;
    options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000));
    return StoreCall::Result(Store(c10::make_intrusive<c10d::TCPStore>(host, options)));
  });
}

/// The addresses of a host in digits, one a line.
StoreCall resolve(std::string host) {
  return StoreCall([host = std::move(host)] {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
      throw Error(ErrorKind::kInvalidArgument, "'" + host + "': " + ::gai_strerror(error));
    }
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
    std::string text;
    for (; found != nullptr; found = found->ai_next) {
      std::array<char, NI_MAXHOST> digits{};
      if (::getnameinfo(found->ai_addr, found->ai_addrlen, digits.data(), digits.size(), nullptr, 0,
                        NI_NUMERICHOST) == 0) {
        text += std::string(text.empty() ? "" : "\n") + digits.data();
      }
    }
    return StoreCall::Result(StoreCall::Bytes(text.begin(), text.end()));
  });
}

py::object to_python(StoreCall& call) {
  auto result = call.result();
  if (const auto* flag = std::get_if<bool>(&result)) return py::bool_(*flag);
  if (const auto* number = std::get_if<std::int64_t>(&result)) return py::int_(*number);
  if (const auto* store = std::get_if<Store>(&result)) return py::cast(*store);
  if (const auto* bytes = std::get_if<StoreCall::Bytes>(&result)) {
    return py::bytes(reinterpret_cast<const char*>(bytes->data()), bytes->size());
  }
  return py::none();
}

}  // namespace

void bind_store_call(py::module_& module) {
  using Result = StoreCall::Result;
  py::class_<StoreCall>(module, "StoreCall")
      .def_static("connect", &connect_tcp_store, py::arg("host"), py::arg("port"),
                  py::arg("timeout_s"))
      .def_static("serve", &serve_tcp_store, py::arg("host"), py::arg("port"), py::arg("timeout_s"),
                  py::arg("listening"))
      .def_static("resolve", &resolve, py::arg("host"))
      .def_static(
          "add",
          [](Store store, std::string key, std::int64_t amount) {
            return StoreCall([=] { return Result(store->add(key, amount)); });
          },
          py::arg("store"), py::arg("key"), py::arg("amount"))
      .def_static(
          "check",
          [](Store store, std::vector<std::string> keys) {
            return StoreCall([=] { return Result(store->check(keys)); });
          },
          py::arg("store"), py::arg("keys"))
      .def_static(
          "get",
          [](Store store, std::string key) {
            return StoreCall([=] { return Result(store->get(key)); });
          },
          py::arg("store"), py::arg("key"))
      .def_static(
          "set",
          [](Store store, std::string key, const py::bytes& value) {
            return StoreCall([store, key, value = to_bytes(value)] {
              store->set(key, value);
              return Result();
            });
          },
          py::arg("store"), py::arg("key"), py::arg("value"))
      .def_static(
          "compare_set",
          [](Store store, std::string key, const py::bytes& expected, const py::bytes& desired) {
            return StoreCall(
                [store, key, expected = to_bytes(expected), desired = to_bytes(desired)] {
                  return Result(store->compareSet(key, expected, desired));
                });
          },
          py::arg("store"), py::arg("key"), py::arg("expected"), py::arg("desired"))
      .def_static(
          "delete_key",
          [](Store store, std::string key) {
            return StoreCall([=] { return Result(store->deleteKey(key)); });
          },
          py::arg("store"), py::arg("key"))
      .def(
          "wait",
          [](const StoreCall& call, double seconds) {
            return call.wait(std::chrono::duration<double>(seconds));
          },
          py::arg("seconds"), py::call_guard<BlockingCall>())
      .def("result", &to_python);
}

}  // namespace torch_ring
