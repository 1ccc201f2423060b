// Request and Work: what is submitted, and its pending result.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/types.h"

namespace torch_ring {

enum class Collective : std::uint8_t {
  kAllreduce,
  kBroadcast,
  kAllgather,
  kAlltoall,
  kReducescatter,
  kBarrier,
  kJoin,
};

const char* name_of(Collective collective);

/// The key of a join, of which a rank has one at a time.
inline constexpr const char* kJoinKey = "join";

/// The part of a request on which all ranks must agree.
struct Fingerprint {
  Collective collective = Collective::kAllreduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::uint8_t device = 0;  // c10::DeviceType, of which this layer knows 0: the host
  std::int32_t root = -1;
  double prescale = 1.0;
  double postscale = 1.0;
  bool joinable = false;            // an allgather in which ranks that have joined give no rows
  std::vector<std::int64_t> shape;  // of an allgather or alltoall: without the first dimension
  std::string name;                 // empty: numbered by the engine

  /// Elements of `shape`.
  std::size_t count() const;

  /// Whether the data is in the host's memory. For Adasum it is brought there.
  bool on_host() const { return device == 0 || op == ReduceOp::kAdasum; }

  /// "allreduce 'a' float32 [3] Average": what errors call it.
  std::string describe() const;

  bool operator==(const Fingerprint&) const = default;
};

/// The buffers belong to the caller and stay valid until the work is done.
struct Request {
  Fingerprint fingerprint;
  std::vector<std::int64_t> rows;  // of an allgather: {this rank's}; of an alltoall: for each rank

  const void* input = nullptr;
  void* output = nullptr;  // may be `input`; of an allgather or alltoall: see `allocate`

  /// Bytes of this rank's input.
  std::size_t input_bytes() const;

  /// On a device, called first: its stream waits for the input. Thread: the progress thread.
  std::function<void()> begin;

  /// Of an allgather or alltoall: called once with the rows that come from each rank, returns the
  /// memory of the result. Thread: the progress thread.
  std::function<void*(std::span<const std::int64_t> rows)> allocate;

  /// Called when the output is written, or on a device: will be when the stream has come so far;
  /// before the work is done. Thread: the progress thread.
  std::function<void()> finish;
};

/// How many of a reducescatter's `rows` each of `size` ranks gets: the first ones one more, if they
/// do not divide evenly.
std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size);

/// The pending result of a request. Made by Engine::submit().
/// Thread: any. Blocking: no.
class Work {
 public:
  explicit Work(Request request) : request_(std::move(request)) {}

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  /// Only when done().
  bool failed() const noexcept { return error_.has_value(); }

  /// Throws the work's error, if it failed. Only when done().
  void check() const {
    if (error_) throw *error_;
  }

  const Request& request() const noexcept { return request_; }

 private:
  friend class RequestQueue;  // names it, and completes it
  friend class Driver;        // runs its request

  // The store releases error_ and the output to whoever acquires it by done().
  void complete() { done_.store(true, std::memory_order_release); }
  void fail(Error error) {
    error_ = std::move(error);
    complete();
  }

  Request request_;
  std::string key_;  // "<collective>.<name>": under what the ranks match it
  Clock::time_point submitted_;
  std::optional<Error> error_;
  std::atomic<bool> done_{false};
};

}  // namespace torch_ring
