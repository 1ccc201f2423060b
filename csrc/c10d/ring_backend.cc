// SPDX-License-Identifier: Apache-2.0
#include "c10d/ring_backend.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/blocking_call.h"
#include "c10d/c10d_requests.h"
#include "core/error.h"

namespace torch_ring {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{10};
// How long rank 0 waits for the others to read its answer, before it may end the store.
constexpr std::chrono::seconds kReading{5};

std::string nonce() {
  std::random_device random;
  return std::to_string((static_cast<std::uint64_t>(random()) << 32U) | random());
}

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

[[noreturn]] void fail(const std::string& why) { throw Error(ErrorKind::kTimeout, why); }

/// The values of one barrier in the store. Each side sends the other a random number, and accepts a
/// value only if it contains its own number, so that values left by an earlier barrier or group of
/// the same name are ignored.
class BarrierStore {
 public:
  BarrierStore(c10d::Store& store, std::uint64_t number)
      : store_(store), number_(std::to_string(number)) {}

  void write(const std::string& key, const std::string& value) {
    store_.set(kPrefix + key, number_ + " " + value);
  }

  /// This barrier's value; empty if there is none.
  std::string read(const std::string& key) const {
    if (!store_.check({kPrefix + key})) return "";
    const std::vector<std::uint8_t> bytes = store_.get(kPrefix + key);
    const std::string text(bytes.begin(), bytes.end());
    return text.starts_with(number_ + " ") ? text.substr(number_.size() + 1) : "";
  }

 private:
  static constexpr const char* kPrefix = "monitored_barrier/";

  c10d::Store& store_;
  const std::string number_;
};

/// Whether `is_there` holds before the deadline; checked at least once.
bool await(Clock::time_point deadline, const std::function<bool()>& is_there,
           const std::function<void()>& check) {
  milliseconds pause = kFirstPause;
  while (!is_there()) {
    if (Clock::now() >= deadline) return false;
    try {
      check();
    } catch (const Error&) {
      if (is_there()) return true;  // a rank that has passed the barrier may have left
      throw;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

std::string here(int rank) { return "here/" + std::to_string(rank); }
std::string answer(int rank) { return "answer/" + std::to_string(rank); }
std::string seen(int rank) { return "seen/" + std::to_string(rank); }

/// For rank 0: returns the ranks that have not arrived.
std::vector<int> gather(BarrierStore& board, int size, Clock::time_point deadline,
                        bool wait_for_all_ranks, const std::function<void()>& check) {
  const std::string call = nonce();
  board.write("call", call);
  std::vector<int> missing;
  std::vector<std::string> calls(static_cast<std::size_t>(size));  // by rank
  for (int other = 1; other < size; ++other) {
    std::string& text = calls[static_cast<std::size_t>(other)];
    const auto has_come = [&] { return (text = board.read(here(other))).starts_with(call + " "); };
    if (await(deadline, has_come, check)) continue;
    missing.push_back(other);
    if (!wait_for_all_ranks) break;
  }
  if (!missing.empty()) return missing;
  for (int other = 1; other < size; ++other) {
    board.write(answer(other), calls[static_cast<std::size_t>(other)].substr(call.size() + 1));
  }
  const auto until = std::min(deadline, Clock::now() + kReading);
  for (int other = 1; other < size; ++other) {
    if (!await(until, [&] { return board.read(seen(other)) == call; }, [] {})) break;
  }
  return missing;
}

/// For other ranks: returns whether rank 0 has answered.
bool come(BarrierStore& board, int rank, Clock::time_point deadline,
          const std::function<void()>& check) {
  const std::string own = nonce();
  std::string call;
  const auto is_answered = [&] {
    const std::string now = board.read("call");
    if (now != call) board.write(here(rank), (call = now) + " " + own);
    return board.read(answer(rank)) == own;
  };
  if (!await(deadline, is_answered, check)) return false;
  board.write(seen(rank), call);
  return true;
}

}  // namespace

void monitored_barrier(c10d::Store& store, int rank, int size, std::uint64_t number,
                       milliseconds timeout, bool wait_for_all_ranks,
                       const std::function<void()>& check) {
  const std::string after = " in " + std::to_string(timeout.count()) + " ms";
  const std::string self = "Rank " + std::to_string(rank);
  if (timeout.count() <= 0) fail(self + " timed out in monitoredBarrier: its timeout is 0");
  const auto deadline = Clock::now() + timeout;
  BarrierStore board(store, number);
  if (rank == 0) {
    const std::vector<int> missing = gather(board, size, deadline, wait_for_all_ranks, check);
    if (missing.empty()) return;
    fail((wait_for_all_ranks ? "Ranks " : "Rank ") + listed(missing) +
         " failed to pass monitoredBarrier" + after);
  }
  const std::string received =
      self +
      " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
      "from rank 0: ";
  bool answered = false;
  try {
    answered = come(board, rank, deadline, check);
  } catch (const c10::DistError& error) {
    fail(received + "the store is gone, has rank 0 ended? " + error.what_without_backtrace());
  }
  if (!answered) {
    fail(received + "it has not answered" + after +
         "; a rank has not come, and rank 0's error names it");
  }
}

namespace {

using c10d::OpType;
using std::chrono::milliseconds;

Tensors flattened(const TensorLists& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

/// The only element of a list: torch.distributed passes lists, once meant for several GPUs.
template <class Element>
const Element& only(const std::vector<Element>& list, const char* what) {
  if (list.size() == 1) return list.front();
  refuse(std::string(what) + ": " + std::to_string(list.size()) +
         " tensors were given, in place of one");
}

bool on_host(const Tensors& tensors) {
  return std::ranges::all_of(tensors, [](const at::Tensor& tensor) { return tensor.is_cpu(); });
}

/// The bytes between the first and the last element of each tensor.
std::vector<MemoryRange> ranges_of(const Tensors& tensors) {
  std::vector<MemoryRange> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0 || !tensor.has_storage()) continue;
    std::int64_t last = 0;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    ranges.push_back({begin, begin + (last + 1) * tensor.itemsize()});
  }
  return ranges;
}

bool meet(const std::vector<MemoryRange>& some, const std::vector<MemoryRange>& others) {
  return std::ranges::any_of(some, [&](const MemoryRange& one) {
    return std::ranges::any_of(others, [&](const MemoryRange& other) {
      return one.begin < other.end && other.begin < one.end;
    });
  });
}

bool all_done(const std::vector<std::shared_ptr<Work>>& works) {
  return std::ranges::all_of(works, [](const auto& work) { return work->done(); });
}

constexpr Clock::time_point kNever = Clock::time_point::max();

/// The profiler's span of an operation that runs in this thread. The constructor of c10d::Work
/// opens the spans of the others.
class ProfilerSpan {
 public:
  ProfilerSpan(const char* title, const Tensors& inputs) : guard_(at::RecordScope::USER_SCOPE) {
    if (!guard_.isActive()) return;
    if (!guard_.needsInputs()) {
      guard_.before(title);
      return;
    }
    const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
    guard_.before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }

 private:
  at::RecordFunction guard_;
};

}  // namespace

RingBackend::RingBackend(int rank, int size, c10::intrusive_ptr<c10d::Store> store,
                         milliseconds timeout, Membership membership)
    : Backend(rank, size),
      store_(std::move(store)),
      timeout_(timeout),
      membership_(std::move(membership)) {
  init();
}

RingBackend::~RingBackend() { shutdown(); }

c10::intrusive_ptr<c10d::Backend::Options> RingBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("ring", timeout_);
}

const PyEngine& RingBackend::connected() {
  refuse_in_child_of(home_);
  if (is_direct_.load(std::memory_order_acquire)) return *py_engine_;
  const CountedCall counted;
  const Engine::Interrupt interrupt = interrupt_at(std::nullopt);
  std::unique_lock lock(connecting_);
  while (!has_connected_.wait_for(lock, kInterrupts, [&] { return !is_connecting_; })) {
    lock.unlock();
    interrupt();
    lock.lock();
  }
  if (!is_direct_.load(std::memory_order_relaxed)) {
    is_connecting_ = true;
    lock.unlock();
    connect();
  }
  return *py_engine_;
}

void RingBackend::connect() {
  std::exception_ptr failure;
  std::optional<Error> error;  // the same, for any thread
  try {
    auto py_engine = membership_.connect();
    auto engine = py_engine->running();
    const std::scoped_lock replacing(replacing_);
    py_engine_ = std::move(py_engine);
    engine_ = std::move(engine);
    is_connected_ = true;
  } catch (const Error& found) {
    failure = std::current_exception();
    error = found;
  } catch (const std::exception& found) {
    failure = std::current_exception();
    error = Error(ErrorKind::kInternal, found.what());
  }
  std::unique_lock lock(connecting_);
  while (!deferred_.empty()) {
    const auto operation = std::move(deferred_.front());
    deferred_.pop_front();
    lock.unlock();
    error ? operation->fail(*error) : operation->begin();
    lock.lock();
  }
  is_connecting_ = false;
  if (!failure) is_direct_.store(true, std::memory_order_release);
  has_connected_.notify_all();
  if (failure) std::rethrow_exception(failure);
}

std::shared_ptr<PendingOperation> RingBackend::defer(Tensors outputs,
                                                     DeferredOperation::Begin begin) {
  refuse_in_child_of(home_);
  const std::scoped_lock lock(connecting_);
  if (is_direct_.load(std::memory_order_relaxed)) return begin();
  auto operation = std::make_shared<DeferredOperation>(std::move(outputs), std::move(begin));
  if (!is_connecting_) {
    auto self = c10::intrusive_ptr<RingBackend>::reclaim_copy(this);
    std::thread([self]() mutable {
      const CountedCall counted;
      try {
        self->connect();
      } catch (const std::exception&) {
        // The operations get it.
      }
      self.reset();
    }).detach();
    is_connecting_ = true;
  }
  deferred_.push_back(operation);
  return operation;
}

std::optional<milliseconds> RingBackend::timeout_of(milliseconds asked) const {
  if (asked == c10d::kUnsetTimeout) asked = milliseconds(later_timeout_ms_.load());
  return asked > kNoTimeout && asked != timeout_ ? std::optional(asked) : std::nullopt;
}

/// Waits for earlier operations that share memory with this one, if either of them writes there.
/// Returns whether there was one since the last call, even if it is done by now: a copy of the
/// memory may be older.
bool RingBackend::await_memory(const Tensors& reads, const Tensors& writes) {
  std::vector<std::shared_ptr<Work>> earlier;
  {
    const std::scoped_lock lock(in_flight_mutex_);
    const std::vector<MemoryRange> read = ranges_of(reads);
    const std::vector<MemoryRange> written = ranges_of(writes);
    for (const InFlight& other : in_flight_) {
      if (meet(other.writes, read) || meet(other.writes, written) || meet(other.reads, written)) {
        earlier.insert(earlier.end(), other.works.begin(), other.works.end());
      }
    }
    std::erase_if(in_flight_, [](const InFlight& other) { return all_done(other.works); });
    has_in_flight_ = !in_flight_.empty();
  }
  const std::shared_ptr<Engine> engine = engine_;  // a signal handler may replace it
  for (const auto& work : earlier) {
    try {
      engine->wait(*work, interrupt_at(std::nullopt));
    } catch (const Error&) {
      // The threads that wait for that operation get it.
    }
  }
  return !earlier.empty();
}

/// Drops the first operations in flight that are done, usually all of them.
void RingBackend::forget_done() {
  const std::scoped_lock lock(in_flight_mutex_);
  while (!in_flight_.empty() && all_done(in_flight_.front().works)) in_flight_.pop_front();
  has_in_flight_ = !in_flight_.empty();
}

std::shared_ptr<PendingOperation> RingBackend::submit(C10dOperation operation,
                                                      const Tensors& inputs) {
  InFlight added{{}, ranges_of(inputs), ranges_of(operation.outputs)};
  auto pending = std::make_shared<PendingCollective>(engine_, std::move(operation), inputs,
                                                     Engine::Mode::kAsynchronous);
  added.works = pending->works();
  const std::scoped_lock lock(in_flight_mutex_);
  in_flight_.push_back(std::move(added));
  has_in_flight_ = true;
  return pending;
}

/// Runs an operation to its end: a single request in host memory in the cheapest way.
void RingBackend::run(C10dOperation operation, const Tensors& inputs) {
  if (operation.requests.size() == 1 && !operation.late_error && on_host(operation.outputs) &&
      on_host(inputs)) {
    const std::shared_ptr<Engine> engine = engine_;  // a signal handler may replace it
    const CountedCall counted;
    engine->submit_and_wait(std::move(operation.requests.front()), interrupt_at(std::nullopt));
    return;
  }
  const PendingCollective submitted(engine_, std::move(operation), inputs, Engine::Mode::kBlocking);
  submitted.wait(std::nullopt);
  submitted.synchronize();
}

/// Runs a blocking operation to its end, and submits any other. `make`: checks the tensors among
/// `given`, and copies those that are not contiguous.
template <class AnyOptions, class Make, class... Given>
RingBackend::Works RingBackend::start(OpType type, const char* title, const Tensors& inputs,
                                      const AnyOptions& options, Make* make,
                                      const Given&... given) {
  refuse_in_child_of(home_);
  if (has_in_flight_) forget_done();  // before a copy is made, which then has their results
  const Place place{rank_, size_};
  C10dOperation operation = make(given..., place);
  const std::uint64_t sequence = ++sequence_;
  const auto timeout = timeout_of(options.timeout);
  std::shared_ptr<PendingOperation> pending;
  if (options.asyncOp && !is_direct_.load(std::memory_order_acquire) && on_host(inputs) &&
      on_host(operation.outputs)) {
    // Copies are made when it begins, because earlier operations may write to the same memory.
    const Tensors outputs = operation.outputs;
    const auto thread = std::this_thread::get_id();
    pending =
        defer(outputs, [this, timeout, thread, inputs, outputs, make, place, ... given = given] {
          await_memory(inputs, outputs);
          C10dOperation begun = make(given..., place);
          for (Request& request : begun.requests) {
            request.timeout = timeout;
            request.thread = thread;
          }
          return submit(std::move(begun), inputs);
        });
  } else {
    connected();
    if (has_in_flight_ && await_memory(inputs, operation.outputs)) {
      operation = make(given..., place);
    }
    for (Request& request : operation.requests) request.timeout = timeout;
    if (!options.asyncOp) {
      const ProfilerSpan span(title, inputs);
      run(std::move(operation), inputs);
      return nullptr;
    }
    pending = submit(std::move(operation), inputs);
  }
  return c10::make_intrusive<RingWork>(rank_, type, title, inputs, std::move(pending), pool_,
                                       sequence);
}

RingBackend::Works RingBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, options);
  return start(OpType::ALLREDUCE, "ring:all_reduce", tensors, options, allreduce_operation, tensors,
               options.reduceOp);
}

RingBackend::Works RingBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& options) {
  return start(OpType::_ALLREDUCE_SPARSE, "ring:all_reduce_sparse", tensors, options,
               sparse_allreduce_operation, only(tensors, "allreduce"), options.reduceOp);
}

RingBackend::Works RingBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return start(OpType::ALLREDUCE_COALESCED, "ring:all_reduce", tensors, options,
               allreduce_operation, tensors, options.reduceOp);
}

RingBackend::Works RingBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start(OpType::BROADCAST, "ring:broadcast", tensors, options, broadcast_operation, tensors,
               options.rootRank);
}

RingBackend::Works RingBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start(OpType::REDUCE, "ring:reduce", tensors, options, reduce_operation,
               only(tensors, "reduce"), options.reduceOp, options.rootRank);
}

RingBackend::Works RingBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  return start(OpType::GATHER, "ring:gather", inputs, options, gather_operation,
               outputs.empty() ? Tensors{} : only(outputs, "gather"), only(inputs, "gather"),
               options.rootRank);
}

RingBackend::Works RingBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  return start(OpType::SCATTER, "ring:scatter", flattened(inputs), options, scatter_operation,
               only(outputs, "scatter"), inputs.empty() ? Tensors{} : only(inputs, "scatter"),
               options.rootRank);
}

RingBackend::Works RingBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  return start(OpType::ALLGATHER, "ring:all_gather", inputs, options, allgather_operation, outputs,
               inputs);
}

RingBackend::Works RingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  return start(OpType::_ALLGATHER_BASE, "ring:_all_gather_base", {input}, options,
               allgather_into_operation, Tensors{output}, Tensors{input});
}

/// Takes, like dist.all_gather_coalesced(), a list for each rank with an output for each input:
/// outputs[r][i].
RingBackend::Works RingBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  TensorLists by_input(inputs.size());
  for (const Tensors& of_rank : outputs) {
    require_as_many("all_gather_coalesced", of_rank.size(), inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_rank[i]);
  }
  return start(OpType::ALLGATHER_COALESCED, "ring:all_gather", inputs, options, allgather_operation,
               by_input, inputs);
}

RingBackend::Works RingBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return start(OpType::COALESCED, "ring:all_gather", inputs, options, allgather_into_operation,
               outputs, inputs);
}

RingBackend::Works RingBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  return start(OpType::REDUCE_SCATTER, "ring:reduce_scatter", flattened(inputs), options,
               reduce_scatter_operation, outputs, inputs, options.reduceOp);
}

RingBackend::Works RingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  return start(OpType::_REDUCE_SCATTER_BASE, "ring:_reduce_scatter_base", {input}, options,
               reduce_scatter_into_operation, Tensors{output}, Tensors{input}, options.reduceOp);
}

RingBackend::Works RingBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return start(OpType::COALESCED, "ring:reduce_scatter", inputs, options,
               reduce_scatter_into_operation, outputs, inputs, options.reduceOp);
}

RingBackend::Works RingBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  return start(OpType::ALLTOALL, "ring:all_to_all", inputs, options, alltoall_operation, outputs,
               inputs);
}

RingBackend::Works RingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_splits,
                                              std::vector<std::int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  return start(OpType::ALLTOALL_BASE, "ring:all_to_all", {input}, options, alltoall_into_operation,
               output, input, output_splits, input_splits);
}

RingBackend::Works RingBackend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor& tensor = only(tensors, "send");
  return start_message(OpType::SEND, "ring:send", tensor, [this, tensor, destination, tag] {
    return py_engine_->send(tensor, destination, tag, kNever);
  });
}

RingBackend::Works RingBackend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  return start_message(OpType::RECV, "ring:recv", tensor, [this, tensor, source, tag] {
    return py_engine_->receive(tensor, source, tag, kNever);
  });
}

RingBackend::Works RingBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  return start_message(OpType::RECVANYSOURCE, "ring:recvAnySource", tensor, [this, tensor, tag] {
    return py_engine_->receive(tensor, std::nullopt, tag, kNever);
  });
}

RingBackend::Works RingBackend::start_message(
    OpType type, const char* title, const at::Tensor& tensor,
    std::function<std::shared_ptr<MessageRequest>()> post) {
  const milliseconds timeout = timeout_of(c10d::kUnsetTimeout).value_or(timeout_);
  auto begin = [this, tensor, timeout, post = std::move(post)] {
    return std::make_shared<PendingMessage>(engine_, post(), tensor, timeout);
  };
  refuse_in_child_of(home_);
  std::shared_ptr<PendingOperation> pending;
  if (is_direct_.load(std::memory_order_acquire)) {
    pending = begin();
  } else {
    pending = defer({tensor}, std::move(begin));
  }
  return c10::make_intrusive<RingWork>(rank_, type, title, Tensors{tensor}, std::move(pending),
                                       pool_, sequence_.load());
}

RingBackend::Works RingBackend::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, "ring:barrier", Tensors{}, options, barrier_operation);
}

void RingBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all_ranks) {
  refuse_in_child_of(home_);
  const milliseconds timeout = options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
  const auto engine = is_connected_ ? engine_ : nullptr;
  monitored_barrier(*store_, rank_, size_, monitored_barriers_++, timeout, wait_for_all_ranks, [&] {
    if (engine) engine->check();
  });
}

at::Tensor RingBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return at::empty({size}, options);
  const at::Tensor tensor = connected().empty_shared({size}, options);
  // DDP makes its views of a bucket of complex numbers in pairs of real ones.
  return tensor.is_complex() ? at::view_as_real(tensor).flatten() : tensor;
}

void RingBackend::setTimeout(milliseconds timeout) { later_timeout_ms_ = timeout.count(); }

c10::intrusive_ptr<c10d::Backend> RingBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  refuse_in_child_of(home_);
  if (std::ranges::find(ranks, rank_) == ranks.end()) return nullptr;
  return membership_.split(store, ranks, options ? options->timeout : timeout_);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
RingBackend::Works RingBackend::reconfigure(const c10d::ReconfigureOptions& options) {
  const bool in_order = std::holds_alternative<std::vector<std::string>>(options.handles);
  const std::vector<std::string> handles = std::visit(
      [](const auto& given) { return std::vector<std::string>(given.begin(), given.end()); },
      options.handles);
  refuse_in_child_of(home_);
  std::unique_lock lock(connecting_);
  has_connected_.wait(lock, [&] { return !is_connecting_; });
  is_connected_ = is_direct_ = false;
  std::tie(rank_, size_) =
      membership_.reconfigure(options.uuid, handles, in_order, options.timeout.value_or(timeout_));
  auto done = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  done->markCompleted();
  return c10d::Work::create_from_future(done);
}
#endif

void RingBackend::abort() {
  if (!home_.is_here()) return;
  std::shared_ptr<Engine> engine;
  {
    const std::scoped_lock lock(replacing_);
    if (is_connected_) engine = engine_;
  }
  const std::string why = "the group was aborted by abort()";
  if (!engine) return membership_.leave(why);
  try {
    engine->end(Error(ErrorKind::kInternal, why));
  } catch (const Error&) {
    // end() throws the cause, which the operations report.
  }
}

void RingBackend::shutdown() {
  if (!home_.is_here()) return abandon();
  membership_.leave({});
  // The callbacks of the pool's threads need the GIL, which the destructor's caller may hold.
  // PyGILState_Check() returns true after the interpreter has ended.
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const WithoutGil no_gil;
    pool_->stop();
  } else {
    pool_->stop();
  }
}

void RingBackend::abandon() {
  pool_->abandon();
  if (engine_) new std::shared_ptr<Engine>(std::move(engine_));
  if (py_engine_) new std::shared_ptr<const PyEngine>(std::move(py_engine_));
}

}  // namespace torch_ring
