// SPDX-License-Identifier: Apache-2.0
// Request and Work: a rank's request for a collective, and its pending result.
#pragma once

#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/types.h"

namespace torch_ring {

/// The collectives, in the order of collectives.inc. A reduce is an allreduce whose result only the
/// root gets; in a gather it gets all ranks' tensors, of equal lengths; in a scatter every rank
/// gets one of its tensors. A fence is a barrier at its place in the order of requests, after which
/// the numbering goes on.
enum class Collective : std::uint8_t {
#define COLLECTIVE(identity, ...) identity,
#include "engine/collectives.inc"
#undef COLLECTIVE
};

/// The data that a rank sends.
enum class Sends : std::uint8_t {
  kNothing,        // it consists of its agreement
  kTensor,         // one tensor, of the same shape on all ranks
  kRows,           // as many rows as it announces
  kRowsForEach,    // for each rank as many rows as it announces
  kOfRoot,         // the root one tensor, the others nothing
  kOfRootForEach,  // the root a tensor for each rank, the others nothing
};

/// A row of collectives.inc.
struct CollectiveTraits {
  const char* name;
  const char* torch;
  const char* span;
  Sends sends;
  bool reduces;
  bool has_root;
  bool has_groups;
};

inline constexpr CollectiveTraits kCollectives[] = {
#define COLLECTIVE(identity, name, torch, span, sends, ...) \
  {name, torch, span, Sends::sends, __VA_ARGS__},
#include "engine/collectives.inc"
#undef COLLECTIVE
};

constexpr const CollectiveTraits& traits_of(Collective collective) {
  return kCollectives[static_cast<std::size_t>(collective)];
}

constexpr const char* name_of(Collective collective) { return traits_of(collective).name; }

/// The name by which a program of torch.distributed has called a collective; kOwn: name_of(). Only
/// for errors: the ranks may have called it differently.
enum class Called : std::uint8_t {
  kOwn,
  kAllReduce,
  kAllGather,
  kAllGatherIntoTensor,
  kAllToAll,
  kAllToAllSingle,
  kReduceScatter,
  kReduceScatterTensor,
  kBarrier,
};

/// Whether all ranks wait for one another, and no data moves.
constexpr bool is_barrier(Collective collective) {
  return collective == Collective::kBarrier || collective == Collective::kFence;
}

constexpr bool reduces(Collective collective) { return traits_of(collective).reduces; }
constexpr bool has_root(Collective collective) { return traits_of(collective).has_root; }

/// Whether ranks announce rows: Request::rows.
constexpr bool has_rows(Collective collective) {
  const Sends sends = traits_of(collective).sends;
  return sends == Sends::kRows || sends == Sends::kRowsForEach;
}

/// The end of errors about ranks that disagree, or that have left.
inline constexpr const char* kAllRanksMustCall =
    "All ranks must call the same collectives, in the same order";

/// The key of every join: a rank has one at a time.
inline constexpr const char* kJoinKey = "join";

/// The part of a request on which all ranks must agree.
struct Fingerprint {
  Collective collective = Collective::kAllreduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::uint8_t device = 0;  // a c10::DeviceType; this layer knows only 0, the host
  std::int32_t root = -1;
  double prescale = 1.0;
  double postscale = 1.0;
  bool joinable = false;        // an allgather that ranks which have joined run with no rows
  bool tells_expected = false;  // an alltoall that also announces the expected rows
  std::uint32_t group = 0;      // the size of its group of requests; 0: none
  // Of an allgather or alltoall: without the first dimension. Of a gather or scatter: of one rank's
  // part.
  std::vector<std::int64_t> shape;
  std::string name;              // empty: numbered by the engine
  Called called = Called::kOwn;  // not encoded: Announcement::called

  /// Elements of `shape`.
  std::size_t count() const;

  /// Whether the collective works on the host's memory. The bindings copy tensors there for
  /// operators that NCCL lacks.
  bool on_host() const { return device == 0 || op == ReduceOp::kAdasum || is_bitwise(op); }

  /// The request in errors: "allreduce 'a' float32 [3] Average". A request of backward
  /// synchronisation has its purpose: in_words().
  std::string describe() const;

  bool operator==(const Fingerprint&) const = default;
};

/// A rank's request for a collective. The buffers belong to the caller and stay valid until the
/// work is done. The progress thread calls the functions.
struct Request {
  Fingerprint fingerprint;
  // Of an allgather: {this rank's}; of an alltoall: the rows for each rank, and then, with
  // `tells_expected`, those that this rank expects from each.
  std::vector<std::int64_t> rows;

  // The output may be the input. That of an allgather or alltoall: see `allocate`. Only the root
  // has an output of a reduce or gather, and an input of a scatter: all parts, in the order of
  // ranks.
  const void* input = nullptr;
  void* output = nullptr;

  std::thread::id thread = std::this_thread::get_id();  // the program's

  // How long this rank waits for late ones; none: EngineConfig::timeout.
  std::optional<std::chrono::milliseconds> timeout;

  // The engine writes the number of the agreement (OperationRecord::sequence) here, before
  // finish(); null: nowhere. finish() keeps it alive.
  std::uint64_t* sequence = nullptr;

  /// Bytes of this rank's input; of a scatter: of one part.
  std::size_t input_bytes() const;

  /// Called first, for a tensor on a device: makes the engine's stream wait for the input.
  std::function<void()> begin;

  /// Called once, for an allgather or alltoall, with the rows of each rank: returns the memory of
  /// the result. For a join: with the number of each pass in which the others run ahead.
  std::function<void*(std::span<const std::int64_t> rows)> allocate;

  /// Called before the work is done, when the output is written or, on a device, its writing is
  /// enqueued. Its exception fails only this work.
  std::function<void()> finish;
};

/// The rows of a reducescatter's `rows` that each of `size` ranks gets. If they do not divide
/// evenly, the first ranks get one more.
std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size);

/// The times when the phases of an operation began; the epoch: not yet. The progress thread stores
/// them. Any thread may read each of them by itself to show the operation's progress, so they need
/// no order. The last reader, Recorder::finished(), runs on the thread that has stored them.
struct OperationTimes {
  std::atomic<Clock::time_point> agreed{Clock::time_point{}};
  std::atomic<Clock::time_point> started{Clock::time_point{}};
  std::atomic<Clock::time_point> packed{Clock::time_point{}};   // into the fusion buffer
  std::atomic<Clock::time_point> reduced{Clock::time_point{}};  // in the fusion buffer
  std::atomic<std::uint64_t> sequence{0};  // in the order of agreements; 0: not agreed
  std::atomic<std::uint64_t> round{0};
  std::atomic<std::chrono::nanoseconds> lag{std::chrono::nanoseconds{0}};  // wait for last_rank
  std::atomic<int> last_rank{-1};
  std::atomic<bool> is_inline{false};
};

/// The pending result of a request. Engine::submit() makes it.
/// Thread: any. Blocking: no.
class Work {
 public:
  explicit Work(Request&& request) : request_(std::move(request)) {}

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  /// Precondition: done().
  bool failed() const noexcept { return error_.has_value(); }

  /// Throws the work's error, if it failed. Precondition: done().
  void check() const {
    if (error_) throw *error_;
  }

  const Request& request() const noexcept { return request_; }

 private:
  friend class RequestQueue;  // names it, and completes it
  friend class Driver;        // runs its request
  friend class Recorder;      // records it

  // The store releases error_ and the output to threads that acquire it by done().
  void complete() { done_.store(true, std::memory_order_release); }
  void fail(Error error) {
    error_ = std::move(error);
    complete();
  }

  Request request_;
  std::string key_;             // by which the ranks match the request: key_of()
  std::uint32_t launches_ = 0;  // on a device: this rank's earlier launches, modulo 2^32
  bool among_threads_ = false;  // Announcement::among_threads
  Clock::time_point submitted_;
  std::uint64_t number_ = 0;  // in the order of submissions: Recorder
  OperationTimes times_;
  std::optional<Error> error_;
  std::atomic<bool> done_{false};
};

/// Names requests without a name by numbers. Ranks that make the same requests in the same order
/// number them alike. An era begins when every rank waits for the same thing, so that ranks that
/// were out of step agree again.
/// Thread: one at a time (with the lock of the RequestQueue).
class Names {
 public:
  /// The next name: "#7", or "#2.7" in a later era. Barriers are numbered separately, so that ranks
  /// with different numbers of requests still wait at the same barrier.
  std::string next(Collective collective) {
    std::string name = "#";
    if (era_ > 0) append(name, era_).push_back('.');
    if (collective == Collective::kBarrier) return append(name.append("barrier."), ++barriers_);
    return append(name, ++numbered_);
  }

  /// Begins an era.
  void renew() {
    ++era_;
    numbered_ = 0;
    barriers_ = 0;
  }

 private:
  static std::string& append(std::string& name, std::uint64_t number) {
    std::array<char, 20> digits;  // of the largest number
    const auto end = std::to_chars(digits.begin(), digits.end(), number).ptr;
    return name.append(digits.begin(), end);
  }

  std::uint64_t era_ = 0;
  std::uint64_t numbered_ = 0;
  std::uint64_t barriers_ = 0;
};

/// The name of the allgather of the ranks' reports. `number` counts the agreements of a process
/// set.
std::string backward_name(std::uint64_t number);

/// The number of the pass, if this is the name of the allgather of its reports and nobody waits for
/// these.
std::optional<std::uint64_t> planned_pass(std::string_view name);

/// The name of the allreduce of a bucket from element `begin` on. `optimizer` is its index on the
/// process set.
std::string bucket_name(std::size_t optimizer, std::uint64_t number, std::size_t bucket,
                        std::int64_t begin);

/// The purpose of an operation of such a name: "averaging the gradients of backward pass 3".
/// Nothing for a name of another kind. Python adds to these names: to that of an agreement
/// ".weights", or ".ahead" if nobody waits for it; in place of the bucket "sparse.", a parameter
/// and a number, "carried." and a parameter, or "loss"; to a bucket's, the names of a compressor's
/// rounds.
std::optional<std::string> in_words(std::string_view name);

/// The same without numbers, alike in each pass and for each bucket: "averaging gradients".
std::optional<std::string> kind_in_words(std::string_view name);

/// Whether `gathered` is `own`, once or repeated: all ranks have sent the same bytes.
bool all_sent(std::string_view gathered, std::string_view own);

}  // namespace torch_ring
