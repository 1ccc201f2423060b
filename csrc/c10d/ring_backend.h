// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "bindings/py_engine.h"
#include "c10d/c10d_requests.h"
#include "c10d/ring_work.h"
#include "core/home_process.h"
#include "engine/engine.h"

namespace torch_ring {

/// A barrier over a store that reports the ranks that have not arrived. Blocks until all ranks have
/// arrived. Rank 0 calls the others, looks for their keys in the store, in their order, answers
/// each, and waits until they have read the answer, because the store may end with rank 0. The
/// messages begin like gloo's, on which programs rely. Cost: three keys for each rank, which later
/// barriers reuse, and a read of the store every 1 to 10 ms.
///
/// Args:
///   number: of this barrier in its group, the same on all ranks.
///   wait_for_all_ranks: whether rank 0 names all missing ranks, or only the first one.
///   check: throws if the group has ended.
///
/// Errors: Error(kTimeout) on rank 0: names the missing ranks; on the others: rank 0 has not
/// answered. Those of `check`.
void monitored_barrier(c10d::Store& store, int rank, int size, std::uint64_t number,
                       std::chrono::milliseconds timeout, bool wait_for_all_ranks,
                       const std::function<void()>& check);

struct MemoryRange {
  const std::byte* begin;
  const std::byte* end;
};

/// torch.distributed's backend `ring`: a group, over an engine. Its operations have no names: the
/// ranks match them by their order in the group, and the engine compares the requests, with the
/// data or before it, so that all ranks get a MismatchError if they differ. The group is connected
/// at its first use.
///
/// A blocking operation (async_op=False) runs in the calling thread and returns no Work; other
/// operations run on the engine's thread, or in a thread that waits for them. In a group that is
/// not connected, the first operations wait in a queue while a thread connects it, because other
/// ranks may wait for this one in other groups before they reach this group. An operation that
/// shares memory with one in flight waits for it, so operations keep their order in this respect,
/// too.
///
/// Thread: any, without the GIL; operations of one group from one thread at a time, or their order
/// is undefined. Blocking: blocking operations, the first one of a group if it is on a device,
/// monitoredBarrier() and shutdown().
/// A forked child has no part in its parent's groups.
/// Errors: torch_ring's errors, which are RuntimeErrors in Python.
class RingBackend final : public c10d::Backend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;

  /// The group's part in Python (torch_ring/c10d/groups.py). Each takes the GIL itself.
  struct Membership {
    std::shared_ptr<void> group;  // the Python object with the functions below
    /// Called once, at the first use. It throws torch_ring's exceptions as Errors, for any thread.
    std::function<std::shared_ptr<const PyEngine>()> connect;
    /// May be called again. `why`: the reason for the other ranks, if no exception is handled.
    std::function<void(const std::string& why)> leave;
    /// A backend for some of the ranks, this one included, in their order.
    std::function<c10::intrusive_ptr<c10d::Backend>(
        const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>&, std::chrono::milliseconds)>
        split;
    std::function<std::string()> handle;  // for reconfigure()
    /// Leaves the group and makes a new one; returns the rank and the size.
    std::function<std::pair<int, int>(std::int64_t uuid, const std::vector<std::string>& handles,
                                      bool in_order, std::chrono::milliseconds timeout)>
        reconfigure;
  };

  /// `store`: of this group alone. `timeout`: of its operations, known to the engine.
  RingBackend(int rank, int size, c10::intrusive_ptr<c10d::Store> store,
              std::chrono::milliseconds timeout, Membership membership);
  ~RingBackend() override;

  const std::shared_ptr<void>& group() const { return membership_.group; }

  const std::string getBackendName() const override { return "ring"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_coalesced(Tensors& tensors,
                            const c10d::AllreduceCoalescedOptions& options) override;
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Works gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Works scatter(Tensors& outputs, TensorLists& inputs,
                const c10d::ScatterOptions& options) override;
  Works allgather(TensorLists& outputs, Tensors& inputs,
                  const c10d::AllgatherOptions& options) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options) override;
  Works allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options) override;
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) override;
  Works reduce_scatter(Tensors& outputs, TensorLists& inputs,
                       const c10d::ReduceScatterOptions& options) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override;
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Works alltoall_base(at::Tensor& output, at::Tensor& input,
                      std::vector<std::int64_t>& output_splits,
                      std::vector<std::int64_t>& input_splits,
                      const c10d::AllToAllOptions& options) override;
  Works send(Tensors& tensors, int destination, int tag) override;
  Works recv(Tensors& tensors, int source, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;
  Works barrier(const c10d::BarrierOptions& options) override;

  /// Over the group's store, so that it can name the missing ranks.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all_ranks) override;

  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }

  /// For CPU tensors: DDP's buckets, and FSDP2's buffers if it is configured so.
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return device < 0; }
  /// A tensor of one dimension whose allreduce copies nothing, if the host's shared memory has
  /// room. Complex numbers are pairs of real ones. Connects the group.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT: torch's

  /// The timeout of operations that begin from now on.
  void setTimeout(std::chrono::milliseconds timeout) override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

#ifdef C10D_BACKEND_HAS_RECONFIGURE  // torch 2.14 and later
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return membership_.handle(); }
  /// Blocks until the new group's ranks are connected. Operations in flight fail.
  Works reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

  /// Fails the operations in flight, and later ones, on all ranks; leaves a group that is not
  /// connected, even while another thread connects it. Blocking: no.
  void abort() override;

  /// Leaves the group. Operations in flight fail.
  void shutdown() override;

 private:
  /// An asynchronous operation that may not be done, and the memory that it uses.
  struct InFlight {
    std::vector<std::shared_ptr<Work>> works;
    std::vector<MemoryRange> reads;
    std::vector<MemoryRange> writes;
  };

  template <class AnyOptions, class Make, class... Given>
  Works start(c10d::OpType type, const char* title, const Tensors& inputs,
              const AnyOptions& options, Make* make, const Given&... given);
  std::shared_ptr<PendingOperation> submit(C10dOperation operation, const Tensors& inputs);
  void run(C10dOperation operation, const Tensors& inputs);
  void forget_done();
  bool await_memory(const Tensors& reads, const Tensors& writes);
  Works start_message(c10d::OpType type, const char* title, const at::Tensor& tensor,
                      std::function<std::shared_ptr<MessageRequest>()> post);
  /// Connects the group at the first call, and waits until it is connected.
  const PyEngine& connected();
  /// Connects the group, and begins the deferred operations. Precondition: this thread has set
  /// is_connecting_.
  void connect();
  /// Begins an operation when the group is connected.
  std::shared_ptr<PendingOperation> defer(Tensors outputs, DeferredOperation::Begin begin);
  /// How long an operation waits for late ranks; none: the group's timeout.
  std::optional<std::chrono::milliseconds> timeout_of(std::chrono::milliseconds asked) const;
  /// In a forked child: leaks the objects of the parent's threads. A second call does nothing.
  void abandon();

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
  const Membership membership_;
  const HomeProcess home_;
  std::atomic<std::int64_t> later_timeout_ms_{0};  // by setTimeout(); 0: not called
  std::atomic<std::uint64_t> sequence_{0};
  std::uint64_t monitored_barriers_ = 0;
  std::mutex connecting_;       // guards the next three
  bool is_connecting_ = false;  // a thread is in connect()
  std::deque<std::shared_ptr<DeferredOperation>> deferred_;
  std::condition_variable has_connected_;  // or has failed to
  std::mutex replacing_;                   // held while the engine changes, and by abort()
  std::atomic<bool> is_connected_{false};  // the next two are set
  std::atomic<bool> is_direct_{false};     // releases them; no operation is deferred any more
  std::shared_ptr<const PyEngine> py_engine_;
  std::shared_ptr<Engine> engine_;
  std::mutex in_flight_mutex_;  // guards the next one
  std::deque<InFlight> in_flight_;
  std::atomic<bool> has_in_flight_{false};
  std::shared_ptr<FuturePool> pool_ = std::make_shared<FuturePool>();
};

}  // namespace torch_ring
