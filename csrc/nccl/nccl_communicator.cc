// SPDX-License-Identifier: Apache-2.0
#include "nccl/nccl_communicator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/at.h"
#include "core/clock.h"
#include "core/error.h"
#include "nccl/bounded_call.h"

namespace torch_ring::nccl {

namespace {

// NCCL takes a call in a thread of its own, mostly within tens of microseconds; the shortest sleep
// takes longer. So at first this thread yields, unless other threads want its processor: then a
// yield may take milliseconds, and the next launches sleep.
constexpr std::chrono::microseconds kYielding{500};
constexpr std::chrono::microseconds kSlowYield{100};
constexpr int kLaunchesWithoutYields = 64;
constexpr std::chrono::microseconds kShortestSleep{10};
constexpr std::chrono::microseconds kLongestSleep{1000};
// How long abort() waits for NCCL.
constexpr std::chrono::milliseconds kFarewell{5000};

RedOp red_op_of(const Reduction& reduction, int size) {
  if (averages(reduction, size)) return RedOp::kAvg;
  switch (reduction.op) {
    case ReduceOp::kMin:
      return RedOp::kMin;
    case ReduceOp::kMax:
      return RedOp::kMax;
    case ReduceOp::kProduct:
      return RedOp::kProd;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      throw Error(ErrorKind::kInvalidArgument,
                  std::string("NCCL has no bitwise operators, so no ") + name_of(reduction.op) +
                      ": use a copy on the CPU");
    default:  // a Sum of bools, which are bytes to NCCL, is their logical or
      return reduction.dtype == DType::kBool ? RedOp::kMax : RedOp::kSum;
  }
}

/// Whether NCCL cannot reduce in the dtype itself: the sum of an Average of integers would wrap
/// around, and there is no int16.
bool needs_widening(const Reduction& reduction) {
  return averages_integers(reduction) || reduction.dtype == DType::kInt16;
}

bool is_one(const Scaling& scaling) {
  return scaling.prescale == 1.0 && scaling.postscale == 1.0 && scaling.divisor == 1;
}

/// The factors of the inputs.
Scaling before(const Reduction& reduction) {
  if (reduction.dtype == DType::kBool) return {};
  if (scales_inputs(reduction)) return reduction.scaling;
  return {.prescale = reduction.scaling.prescale};
}

/// The factors of the result.
Scaling after(const Reduction& reduction, int size) {
  if (reduction.dtype == DType::kBool || scales_inputs(reduction)) return {};
  return {.postscale = reduction.scaling.postscale,
          .divisor = averages(reduction, size) ? 1 : reduction.scaling.divisor};
}

const std::byte* bytes_at(const void* data, std::size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}
std::byte* bytes_at(void* data, std::size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

bool all_equal(std::span<const std::size_t> values) {
  return std::all_of(values.begin(), values.end(), [&](auto value) { return value == values[0]; });
}

}  // namespace

bool scales_inputs(const Reduction& reduction) {
  const Scaling& scaling = reduction.scaling;
  return reduction.dtype == DType::kFloat16 && reduction.op == ReduceOp::kSum &&
         std::abs(scaling.postscale) < static_cast<double>(scaling.divisor);
}

bool averages(const Reduction& reduction, int size) {
  const DType part = part_of(reduction.dtype);
  const bool is_exact = size > 1 && std::has_single_bit(static_cast<unsigned>(size));
  return reduction.op == ReduceOp::kSum && reduction.scaling.divisor == size && is_exact &&
         (part == DType::kFloat32 || part == DType::kFloat64);
}

/// A group of NCCL calls, which end() starts together. A call that throws leaves the communicator
/// failed and the group open; the destructor closes it.
class NcclCommunicator::Group {
 public:
  explicit Group(NcclCommunicator& communicator) : communicator_(communicator) {
    communicator_.wait(communicator_.api_.group_start(), "ncclGroupStart");
  }
  ~Group() {
    if (!ended_) communicator_.api_.group_end();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Checks a call's result. Within a group a call is only recorded; end() waits for its progress.
  void add(Result result, const char* call) {
    if (result != Result::kInProgress && result != Result::kSuccess) {
      communicator_.fail(result, call);
    }
  }

  void end() {
    ended_ = true;
    communicator_.wait(communicator_.api_.group_end(), "ncclGroupEnd");
  }

 private:
  NcclCommunicator& communicator_;
  bool ended_ = false;
};

NcclCommunicator::NcclCommunicator(const Api& api, const UniqueId& id, int rank, int size,
                                   const Abort& abort, std::chrono::milliseconds timeout,
                                   Device device)
    : api_(api),
      rank_(rank),
      size_(size),
      abort_(abort),
      timeout_(timeout),
      device_(std::move(device)) {
  Config config;
  try {
    Comm comm = nullptr;
    const Result result = api_.comm_init_rank_config(&comm, size, id, rank, &config);
    comm_ = comm;
    wait(result, "ncclCommInitRankConfig");
  } catch (const Error&) {
    this->abort();
    throw;
  }
}

bool NcclCommunicator::close() noexcept {
  if (failed_.exchange(true)) {
    abort();
  } else if (Comm const comm = comm_.exchange(nullptr)) {
    // If there is no thread for it, the communicator stays until the process exits.
    call_aside(on_device([api = api_, comm] {
      Result state = Result::kSuccess;
      api.comm_get_async_error(comm, &state);
      state == Result::kSuccess ? api.comm_destroy(comm) : api.comm_abort(comm);
    }));
  }
  return !left_behind_;
}

void NcclCommunicator::abort() noexcept {
  failed_ = true;
  Comm const comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  const auto patience = std::min(timeout_, kFarewell);
  if (call_bounded(on_device([api = api_, comm] { api.comm_abort(comm); }), patience)) return;
  left_behind_ = true;
  if (!device_.log) return;
  try {
    device_.log("rank " + std::to_string(rank_) + ": ncclCommAbort has not returned within " +
                in_seconds(patience) + "; its thread and its memory are left behind");
  } catch (...) {  // the log itself has failed
  }
}

/// `call`, which outlives this object, for another thread.
std::function<void()> NcclCommunicator::on_device(std::function<void()> call) const {
  if (!device_.use) return call;
  return [use = device_.use, call = std::move(call)] { use(call); };
}

void NcclCommunicator::allreduce(const void* input, void* output, std::size_t count,
                                 const Reduction& reduction, std::span<const std::int64_t>) {
  input = scaled(input, count, reduction, output);
  if (needs_widening(reduction)) {
    device_.narrow(output, reduce_widened(input, count, reduction), count, reduction);
    return;
  }
  wait(api_.all_reduce(input, output, count * parts_of(reduction.dtype),
                       data_type_of(reduction.dtype), red_op_of(reduction, size_), comm_,
                       device_.stream),
       "ncclAllReduce");
  finish(output, count, reduction);
}

/// The elements of all ranks, widened, and reduced on every rank.
Widened NcclCommunicator::reduce_widened(const void* input, std::size_t count,
                                         const Reduction& reduction) {
  const Widened wide = device_.widen(input, count, reduction);
  wait(api_.all_reduce(wide.data, wide.data, count * wide.item, data_type_of(wide.dtype),
                       red_op_of(reduction, size_), comm_, device_.stream),
       "ncclAllReduce");
  return wide;
}

void NcclCommunicator::broadcast(void* data, std::size_t bytes, int root) {
  wait(api_.broadcast(data, data, bytes, DataType::kUInt8, root, comm_, device_.stream),
       "ncclBroadcast");
}

void NcclCommunicator::allgather(const void* input, void* output,
                                 std::span<const std::size_t> bytes) {
  if (all_equal(bytes)) {
    wait(api_.all_gather(input, output, bytes[0], DataType::kUInt8, comm_, device_.stream),
         "ncclAllGather");
    return;
  }
  Group group(*this);
  std::size_t start = 0;
  for (int root = 0; root < size_; ++root) {
    const std::size_t part = at(bytes, root);
    if (part > 0) {
      group.add(api_.broadcast(input, bytes_at(output, start), part, DataType::kUInt8, root, comm_,
                               device_.stream),
                "ncclBroadcast");
    }
    start += part;
  }
  group.end();
}

void NcclCommunicator::alltoall(const void* input, void* output,
                                std::span<const std::size_t> bytes) {
  const auto size = static_cast<std::size_t>(size_);
  const auto self = static_cast<std::size_t>(rank_);
  std::size_t sent = 0;
  std::size_t received = 0;
  Group group(*this);
  for (std::size_t peer = 0; peer < size; ++peer) {
    const auto other = static_cast<int>(peer);
    if (const std::size_t part = bytes[self * size + peer]; part > 0) {
      group.add(
          api_.send(bytes_at(input, sent), part, DataType::kUInt8, other, comm_, device_.stream),
          "ncclSend");
      sent += part;
    }
    if (const std::size_t part = bytes[peer * size + self]; part > 0) {
      group.add(api_.recv(bytes_at(output, received), part, DataType::kUInt8, other, comm_,
                          device_.stream),
                "ncclRecv");
      received += part;
    }
  }
  group.end();
}

void NcclCommunicator::reducescatter(const void* input, void* output,
                                     std::span<const std::size_t> counts,
                                     const Reduction& reduction) {
  const auto own = counts.begin() + rank_;
  const auto earlier = std::accumulate(counts.begin(), own, std::size_t{0});
  const auto all = std::accumulate(own, counts.end(), earlier);
  input = scaled(input, all, reduction, nullptr);
  if (needs_widening(reduction)) {  // rare: all ranks get everything, and each narrows its own part
    Widened wide = reduce_widened(input, all, reduction);
    wide.data = bytes_at(wide.data, earlier * wide.item * size_of(wide.dtype));
    device_.narrow(output, wide, *own, reduction);
    return;
  }
  const DataType type = data_type_of(reduction.dtype);
  const RedOp op = red_op_of(reduction, size_);
  const std::size_t parts = parts_of(reduction.dtype);
  if (all_equal(counts)) {
    wait(api_.reduce_scatter(input, output, counts[0] * parts, type, op, comm_, device_.stream),
         "ncclReduceScatter");
  } else {
    Group group(*this);
    std::size_t start = 0;
    for (int root = 0; root < size_; ++root) {
      const std::size_t part = at(counts, root);
      if (part > 0) {
        group.add(api_.reduce(bytes_at(input, start), output, part * parts, type, op, root, comm_,
                              device_.stream),
                  "ncclReduce");
      }
      start += part * size_of(reduction.dtype);
    }
    group.end();
  }
  finish(output, at(counts, rank_), reduction);
}

void NcclCommunicator::reduce_to(int root, const void* input, void* output, std::size_t count,
                                 const Reduction& reduction) {
  const bool at_root = rank_ == root;
  input = scaled(input, count, reduction, at_root ? output : nullptr);
  if (needs_widening(reduction)) {
    const Widened wide = device_.widen(input, count, reduction);
    wait(api_.reduce(wide.data, wide.data, count * wide.item, data_type_of(wide.dtype),
                     red_op_of(reduction, size_), root, comm_, device_.stream),
         "ncclReduce");
    if (at_root) device_.narrow(output, wide, count, reduction);
    return;
  }
  wait(api_.reduce(input, output, count * parts_of(reduction.dtype), data_type_of(reduction.dtype),
                   red_op_of(reduction, size_), root, comm_, device_.stream),
       "ncclReduce");
  if (at_root) finish(output, count, reduction);
}

void NcclCommunicator::check() {
  Comm const comm = comm_;
  if (comm == nullptr) return;
  Result state = Result::kSuccess;
  const Result asked = api_.comm_get_async_error(comm, &state);
  if (asked != Result::kSuccess) fail(asked, "ncclCommGetAsyncError");
  if (state != Result::kSuccess && state != Result::kInProgress) fail(state, "NCCL");
}

/// Returns when NCCL has accepted the call that returned `result`.
void NcclCommunicator::wait(Result result, const char* call) {
  const auto begun = Clock::now();
  auto pause = kShortestSleep;
  bool yields = result == Result::kInProgress && --sleeping_launches_ < 0;
  while (result == Result::kInProgress) {
    if (abort_.raised()) failed_ = true;
    abort_.check();
    const auto waited = Clock::now() - begun;
    if (waited > timeout_) {
      failed_ = true;
      throw Error(ErrorKind::kTimeout,
                  std::string(call) + " was not taken within " + in_seconds(timeout_) +
                      ": another rank has not called it, or cannot be reached");
    }
    if (yields && waited < kYielding) {
      std::this_thread::yield();
      yields = Clock::now() - begun - waited < kSlowYield;
      sleeping_launches_ = yields ? 0 : kLaunchesWithoutYields;
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestSleep);
    }
    const Result asked = api_.comm_get_async_error(comm_, &result);
    if (asked != Result::kSuccess) result = asked;
  }
  if (result != Result::kSuccess) fail(result, call);
}

void NcclCommunicator::fail(Result result, const char* call) {
  failed_ = true;
  Comm const comm = comm_;
  const char* detail = comm ? api_.get_last_error(comm) : nullptr;
  const bool remote = result == Result::kRemoteError;
  throw Error(remote ? ErrorKind::kPeerLost : ErrorKind::kInternal,
              std::string(call) + ": " + api_.get_error_string(result) +
                  (detail && *detail ? std::string(" (") + detail + ")" : "") +
                  (remote ? "; another rank has probably died" : "") +
                  ". NCCL_DEBUG=WARN tells more");
}

/// The inputs times their factors: `input` itself, or `output`, or new memory if it is null.
const void* NcclCommunicator::scaled(const void* input, std::size_t count,
                                     const Reduction& reduction, void* output) {
  const Scaling scaling = before(reduction);
  if (count == 0 || is_one(scaling)) return input;
  if (!output) output = device_.allocate(count * size_of(reduction.dtype));
  device_.scale(output, input, count, reduction.dtype, scaling);
  return output;
}

/// Applies the factors of the result.
void NcclCommunicator::finish(void* data, std::size_t count, const Reduction& reduction) {
  const Scaling scaling = after(reduction, size_);
  if (count == 0 || is_one(scaling)) return;
  device_.scale(data, data, count, reduction.dtype, scaling);
}

}  // namespace torch_ring::nccl
