// SPDX-License-Identifier: Apache-2.0
// DeviceChoice and make_accelerator(): one of torch's accelerators, with NCCL on it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/reduce.h"
#include "engine/device.h"
#include "engine/request.h"

namespace torch_ring {

/// The kind of work that would be captured.
enum class Captured { kCollective, kBackward };

/// The reason why `what` must not run now, if this thread's current stream on `device` is being
/// captured into a CUDA graph: a replay runs on the device alone, so no rank would agree on its
/// collectives, and no hook would see its gradients. Nothing for the CPU. It takes the GIL: hold no
/// lock. Thread: any. Blocking: no.
std::optional<std::string> capture_problem(c10::Device device, Captured what);

/// This thread's current stream on the device.
c10::Stream current_stream(c10::Device device);

/// Protects a freed tensor's memory from reuse until the stream has done the work enqueued on it
/// before the release. Does nothing for memory that the device's own allocator does not own.
void record_on_stream(const at::Tensor& tensor, c10::Stream stream);

/// The streams of one device that produce data for one other stream.
/// Thread: one at a time.
class Producers {
 public:
  void add(c10::Stream stream);

  /// Makes `stream` wait for the work on the others now, and forgets them.
  void join(c10::Stream stream);

  void clear() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;  // each once
};

/// An event, recorded now on the current stream. It comes from a pool, to which it returns with its
/// last reference, so that the driver need not make and free one for each operation. Thread: any.
std::shared_ptr<c10::Event> recorded_now(c10::Device device);

/// The end of work that is enqueued together on a stream.
struct WorkEnd {
  const c10::Stream stream;
  const std::uint64_t number;                   // in the order of the stream
  std::shared_ptr<c10::Event> event = nullptr;  // null until all of the work is enqueued
};

/// Work that one thread enqueues on a device's stream.
struct EnqueuedWork {
  std::vector<at::Tensor> kept;                      // the tensors that it uses
  std::vector<std::shared_ptr<c10::Event>> awaited;  // events of other streams
  std::shared_ptr<WorkEnd> end;
};

/// While this lives, keep_for_stream() and OutputEvent note in `work` what this thread enqueues.
class EnqueueingScope {
 public:
  explicit EnqueueingScope(EnqueuedWork& work);
  ~EnqueueingScope();
  EnqueueingScope(const EnqueueingScope&) = delete;
  EnqueueingScope& operator=(const EnqueueingScope&) = delete;
};

/// Keeps a tensor for the work in this thread's EnqueueingScope; does nothing without one, as on
/// the host.
void keep_for_stream(const at::Tensor& tensor);

/// The events before and after a request's work on a device.
class OutputEvent {
 public:
  /// `ready`: recorded when the input is there. The requests of a group share it.
  OutputEvent(c10::Device device, std::shared_ptr<c10::Event> ready);

  /// Makes the request wait for its input, and this event for the request. The host waits for
  /// neither.
  void follow(Request& request);

  // The same without a request, before and after the work is enqueued. Thread: one in an
  // EnqueueingScope.
  void begin() const { events_->begin(); }
  void finish() const { events_->finish(); }

  /// Whether the output has been written. Call this and wait() only when the request's Work is
  /// done, which means that its device work is enqueued.
  bool query() const { return !events_->end || events_->end->event->query(); }
  /// Makes the current stream wait for the output, and keeps `output` alive for that stream's work.
  /// `waited`: another one for which that stream waits already; may be null.
  void wait(const at::Tensor& output, const OutputEvent* waited = nullptr) const;

 private:
  struct Events {
    void begin() const;
    void finish();

    c10::Device device;
    std::shared_ptr<c10::Event> ready;
    std::shared_ptr<WorkEnd> end = nullptr;  // of the work with which the output is written
  };

  std::shared_ptr<Events> events_;
  std::optional<c10::Stream> home_;  // the stream of the output's allocation, if the caller made it
};

/// The device of this process's tensors, chosen by the first tensor. Thread: any.
class DeviceChoice {
 public:
  /// The one choice that all live engines share.
  static std::shared_ptr<DeviceChoice> of_process();

  /// Chooses `device`, or checks that it is the chosen one. Does nothing for the CPU. Errors:
  /// Error(kInvalidArgument) if another device is chosen, or if the thread's stream is being
  /// captured into a CUDA graph.
  void use(c10::Device device);

  /// The chosen device, if there is one.
  std::optional<c10::Device> chosen();

  /// Prefers the thread's current device, for a rank that has no tensor on a device yet.
  void prefer_current();

  /// The chosen device. If there is none, chooses the preferred one, or else the current one of
  /// that type. Errors: c10::Error if there is none.
  c10::Device get(c10::DeviceType type);

 private:
  std::mutex mutex_;
  std::optional<c10::Device> device_;
  std::optional<c10::Device> preferred_;
};

/// NCCL's settings in the environment.
struct NcclSettings {
  std::string library;    // its path, or empty
  bool blocking = false;  // NCCL_COMM_BLOCKING is set, which cannot be used here
  bool in_clear = false;  // it would send data between hosts that the settings want encrypted
};

/// How long the ranks' devices wait for one another, and the log for warnings.
struct DevicePatience {
  EngineConfig config;
  std::function<void(const std::string&)> log;  // takes a warning
};

/// Makes a device for DeviceExecutor::Make. Its stream waits for late ranks according to
/// `patience`, and calls of NCCL take at most its transfer_timeout(). `labels`: by rank.
std::unique_ptr<Device> make_accelerator(DeviceChoice& choice, c10::DeviceType type,
                                         Communicator& host, const Abort& abort,
                                         const DevicePatience& patience,
                                         const std::vector<std::string>& labels,
                                         const NcclSettings& settings);

/// output = input * scaling.prescale * scaling.postscale / scaling.divisor. Floating-point and
/// complex numbers are multiplied by one factor, 16-bit floats in float32, and rounded once.
/// Integers, which have no divisor here, are scaled as in reduce.h, truncated toward zero and
/// clamped to the range of the dtype. Booleans are copied. `output` may be `input`, or another
/// tensor over the same memory.
void scale(const at::Tensor& output, const at::Tensor& input, const Scaling& scaling);

/// `tensor`, one-dimensional integers, converted to int32 or int64 for a reduction that would wrap
/// around in its dtype, or for a dtype that NCCL lacks. An int64 of an Average of n ranks becomes
/// two numbers, its quotient by n and the remainder, because the sums of n of these fit int64.
at::Tensor widened(const at::Tensor& tensor, const Reduction& reduction);

/// Writes the reduction to `output`, with all factors except the prescale, which its inputs have
/// already. `wide`: the reduced numbers of widened().
void narrow(const at::Tensor& output, const at::Tensor& wide, const Reduction& reduction);

}  // namespace torch_ring
