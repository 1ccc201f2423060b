// SPDX-License-Identifier: Apache-2.0
// Executor: the agreed requests of a round, run over one communicator.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "collective/communicator.h"
#include "core/types.h"
#include "engine/agreement.h"
#include "engine/request.h"

namespace torch_ring {

struct Copy {
  void* to;
  const void* from;
  std::size_t count;  // elements
};

/// The memory operations of an executor, on the memory of its communicator: of the host or of a
/// device. On a device all operations are enqueued on the communicator's stream, in the order of
/// the calls.
/// Thread: the progress thread. Blocking: no. Errors: std::bad_alloc, or the device's.
class Buffers {
 public:
  virtual ~Buffers() = default;

  /// New memory, freed when the work that uses it has run.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;

  /// Memory for the tensors of a fused collective. It is valid until the next call.
  virtual void* fusion_buffer(std::size_t bytes) = 0;

  virtual void copy(std::span<const Copy> copies, DType dtype) = 0;

  /// Fills `data` with the identity of `op`, as core/reduce.h defines it.
  virtual void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) = 0;
};

class HostBuffers final : public Buffers {
 public:
  std::shared_ptr<void> allocate(std::size_t bytes) override;
  void* fusion_buffer(std::size_t bytes) override;
  void copy(std::span<const Copy> copies, DType dtype) override;
  void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) override;

 private:
  std::vector<std::byte> buffer_;
};

/// The groups of allreduces that are reduced in one buffer: indices of `fingerprints`, ordered by
/// the first members of the groups. Members of a group have equal dtype, op and scaling, and
/// together at most `threshold_bytes`; a larger tensor is a group of its own. Every request must be
/// an allreduce.
std::vector<std::vector<std::size_t>> plan_fusion(std::span<const Fingerprint* const> fingerprints,
                                                  std::size_t threshold_bytes);

/// The request of a rank that has joined, in place of one of its own: it contributes the identity
/// of a reduction, or no rows. Nobody reads its result.
struct StandIn {
  /// `buffers` belong to the executor that will run the request, and outlive it.
  StandIn(const Fingerprint& fingerprint, Buffers& buffers);
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

  Request request;
  std::shared_ptr<void> data;
};

/// The reduction of a request on `communicator`.
Reduction reduction_of(const Fingerprint& fingerprint, const Communicator& communicator);

/// A decision and this rank's request for it.
struct Job {
  const Request* request;
  const Decision* decision;
  OperationTimes* times = nullptr;  // for the times of its phases; may be null
};

/// Runs jobs over a communicator, on memory of its kind.
/// Thread: the progress thread. Blocking: as the communicator.
/// Errors: the communicator's and the buffers'; Error(kInternal) on an inline payload of a wrong
/// size.
class Executor {
 public:
  Executor(Communicator& communicator, Buffers& buffers, std::size_t fusion_threshold_bytes)
      : communicator_(communicator),
        buffers_(buffers),
        fusion_threshold_bytes_(fusion_threshold_bytes) {}

  /// Runs the jobs of one round: first those that cannot be fused, in their order, then the others
  /// in fused groups. Calls done(index of the job) when the output of a job is written (on a
  /// device: enqueued).
  template <class Done>
  void run(std::span<const Job> jobs, Done&& done) {
    for (const Job& job : jobs) {
      if (job.request->begin) job.request->begin();
    }
    std::vector<std::size_t> allreduces;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      if (fuses(jobs[i])) {
        allreduces.push_back(i);
      } else {
        if (jobs[i].times != nullptr && !jobs[i].decision->is_inline) begin(jobs[i]);
        run_one(jobs[i]);
        done(i);
      }
    }
    if (allreduces.empty()) return;
    std::vector<const Fingerprint*> fingerprints;
    for (const std::size_t i : allreduces) fingerprints.push_back(&jobs[i].request->fingerprint);
    for (const auto& group : plan_fusion(fingerprints, fusion_threshold_bytes_)) {
      std::vector<const Request*> requests;
      std::vector<OperationTimes*> times;
      for (const std::size_t member : group) {
        const Job& job = jobs[allreduces[member]];
        requests.push_back(job.request);
        if (job.times != nullptr) times.push_back(job.times);
      }
      allreduce_fused(requests, times);
      for (const std::size_t member : group) done(allreduces[member]);
    }
  }

 private:
  static bool fuses(const Job& job);
  Reduction reduction_of(const Fingerprint& fingerprint) const {
    return torch_ring::reduction_of(fingerprint, communicator_);
  }
  static void begin(const Job& job);
  void run_one(const Job& job);
  void run_inline(const Request& request, const Decision& decision);
  void collect_inline(const Request& request, const Decision& decision);
  void allgather(const Request& request, const Decision& decision);
  void alltoall(const Request& request, const Decision& decision);
  void reducescatter(const Request& request);
  void allreduce_fused(std::span<const Request* const> requests,
                       std::span<OperationTimes* const> times);
  void adasum_fused(std::span<const Request* const> requests);
  std::vector<std::size_t> parts_of_all(const Fingerprint& fingerprint) const;
  std::size_t scattered_count(const Fingerprint& fingerprint, int rank) const;

  Communicator& communicator_;
  Buffers& buffers_;
  const std::size_t fusion_threshold_bytes_;
  std::vector<const void*> inputs_;  // of all ranks, in run_inline(); a member to reuse its memory
};

}  // namespace torch_ring
