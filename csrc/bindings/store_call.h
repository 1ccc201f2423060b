// StoreCall: one call of a store of torch.distributed, or on the way to it, which its caller can
// give up.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <variant>
#include <vector>

namespace pybind11 {
class module_;
}

namespace torch_ring {

/// The stores of torch wait for their server, and the system for a host's address, without a
/// deadline of ours, and no signal interrupts them. So each call has a thread, which does not know
/// Python: one that is given up sleeps on until its server answers or the process ends, and
/// disturbs neither a fork nor the end of the interpreter.
///
/// Thread: one at a time. Blocking: wait().
class StoreCall {
 public:
  using Bytes = std::vector<std::uint8_t>;
  using Result =
      std::variant<std::monostate, bool, std::int64_t, Bytes, c10::intrusive_ptr<c10d::Store>>;

  /// Begins `call`, which owns what it uses. Errors: std::system_error if there is no thread for
  /// it.
  explicit StoreCall(std::function<Result()> call);

  /// Whether the call has ended; waits for that at most so long.
  bool wait(std::chrono::duration<double> time) const;

  /// Its result, to be called once, after it has ended. Errors: those of the call.
  Result result();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

void bind_store_call(pybind11::module_& module);

}  // namespace torch_ring
