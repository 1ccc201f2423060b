// SPDX-License-Identifier: Apache-2.0
#include "engine/executor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

#include "core/at.h"
#include "core/reduce.h"

namespace torch_ring {

std::shared_ptr<void> HostBuffers::allocate(std::size_t bytes) {
  return std::make_shared<std::byte[]>(bytes);
}

void* HostBuffers::fusion_buffer(std::size_t bytes) {
  if (buffer_.size() < bytes) buffer_.resize(bytes);
  return buffer_.data();
}

void HostBuffers::copy(std::span<const Copy> copies, DType dtype) {
  for (const auto& [to, from, count] : copies) {
    if (count > 0) std::memcpy(to, from, count * size_of(dtype));
  }
}

void HostBuffers::fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) {
  torch_ring::fill_identity(data, count, dtype, op);
}

std::vector<std::vector<std::size_t>> plan_fusion(std::span<const Fingerprint* const> fingerprints,
                                                  std::size_t threshold_bytes) {
  const auto kind = [](const Fingerprint& f) {
    return std::tuple(f.dtype, f.op, f.prescale, f.postscale);
  };
  std::vector<std::vector<std::size_t>> groups;
  std::vector<std::size_t> group_bytes;
  for (std::size_t i = 0; i < fingerprints.size(); ++i) {
    const Fingerprint& f = *fingerprints[i];
    const std::size_t bytes = f.count() * size_of(f.dtype);
    std::size_t group = 0;
    while (group < groups.size() && (kind(*fingerprints[groups[group].front()]) != kind(f) ||
                                     group_bytes[group] + bytes > threshold_bytes)) {
      ++group;
    }
    if (group == groups.size()) {
      groups.emplace_back();
      group_bytes.push_back(0);
    }
    groups[group].push_back(i);
    group_bytes[group] += bytes;
  }
  return groups;
}

namespace {

std::size_t row_bytes_of(const Fingerprint& f) { return f.count() * size_of(f.dtype); }

/// The bytes of a rank's inline payload, from the rows that all ranks announced.
std::size_t expected_bytes(const Fingerprint& f, const Decision& decision, int size, int rank) {
  const std::int64_t* rows = decision.rows.data();
  switch (traits_of(f.collective).sends) {
    case Sends::kNothing:
      return 0;
    case Sends::kTensor:
      return row_bytes_of(f);
    case Sends::kRows:
      return static_cast<std::size_t>(rows[rank]) * row_bytes_of(f);
    case Sends::kRowsForEach:
      return static_cast<std::size_t>(
                 std::accumulate(rows + rank * size, rows + (rank + 1) * size, std::int64_t{0})) *
             row_bytes_of(f);
    case Sends::kOfRoot:
      return rank == f.root ? row_bytes_of(f) : 0;
    case Sends::kOfRootForEach:
      return rank == f.root ? static_cast<std::size_t>(size) * row_bytes_of(f) : 0;
  }
  return 0;
}

/// Checks the rows that the ranks have announced: the right number of entries, none negative, and
/// no overflow of the total bytes.
void check_rows(const Fingerprint& f, const Decision& decision, int size) {
  std::size_t expected = 0;
  const Sends sends = traits_of(f.collective).sends;
  if (sends == Sends::kRows) expected = static_cast<std::size_t>(size);
  if (sends == Sends::kRowsForEach) expected = static_cast<std::size_t>(size * size);
  if (expected == 0 && decision.rows.empty()) return;
  const auto most = static_cast<std::int64_t>(std::numeric_limits<std::int64_t>::max() /
                                              std::max<std::size_t>(row_bytes_of(f), 1) /
                                              std::max<std::size_t>(expected, 1));
  const bool in_range = std::ranges::all_of(
      decision.rows, [&](std::int64_t rows) { return rows >= 0 && rows <= most; });
  if (decision.rows.size() != expected || !in_range) {
    throw Error(ErrorKind::kInternal, "the ranks announced broken rows of " + f.describe());
  }
}

std::size_t bytes_of_all(std::span<const Request* const> requests) {
  return std::accumulate(
      requests.begin(), requests.end(), std::size_t{0},
      [](std::size_t sum, const Request* request) { return sum + request->input_bytes(); });
}

/// Records that a phase of fused operations begins now.
void stamp(std::span<OperationTimes* const> times,
           std::atomic<Clock::time_point> OperationTimes::* phase) {
  if (times.empty()) return;
  const auto now = Clock::now();
  for (OperationTimes* const each : times) (each->*phase).store(now, std::memory_order_relaxed);
}

void concatenate(void* to, std::span<const ByteSpan> parts) {
  auto* at = static_cast<std::byte*>(to);
  for (const ByteSpan part : parts) {
    if (!part.empty()) std::memcpy(at, part.data(), part.size());
    at += part.size();
  }
}

}  // namespace

StandIn::StandIn(const Fingerprint& fingerprint, Buffers& buffers) {
  request.fingerprint = fingerprint;
  if (fingerprint.collective == Collective::kAllreduce) {
    data = buffers.allocate(row_bytes_of(fingerprint));
    buffers.fill_identity(data.get(), fingerprint.count(), fingerprint.dtype, fingerprint.op);
    request.input = request.output = data.get();
    return;
  }
  request.rows = {0};
  request.allocate = [this, &buffers](std::span<const std::int64_t> rows) {
    const auto all = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    data = buffers.allocate(static_cast<std::size_t>(all) * row_bytes_of(request.fingerprint));
    return data.get();
  };
}

bool Executor::fuses(const Job& job) {
  return job.request->fingerprint.collective == Collective::kAllreduce &&
         !job.decision->is_inline && job.decision->shared_offsets.empty();
}

Reduction reduction_of(const Fingerprint& f, const Communicator& communicator) {
  Reduction reduction{f.dtype, f.op, {f.prescale, f.postscale, 1}};
  if (f.op == ReduceOp::kAverage) {
    reduction.op = ReduceOp::kSum;
    reduction.scaling.divisor = communicator.size();
  }
  return reduction;
}

void Executor::begin(const Job& job) {
  job.times->started.store(Clock::now(), std::memory_order_relaxed);
}

void Executor::run_one(const Job& job) {
  const Request& request = *job.request;
  const Fingerprint& f = request.fingerprint;
  check_rows(f, *job.decision, communicator_.size());
  if (job.decision->is_inline) {
    run_inline(request, *job.decision);
    return;
  }
  switch (f.collective) {
    case Collective::kAllreduce:
      communicator_.allreduce(request.input, request.output, f.count(), reduction_of(f),
                              job.decision->shared_offsets);
      break;
    case Collective::kBroadcast: {
      const std::size_t bytes = request.input_bytes();
      if (f.root == communicator_.rank() && request.output != request.input) {
        const Copy own{request.output, request.input, bytes};
        buffers_.copy({&own, 1}, DType::kUInt8);
      }
      communicator_.broadcast(request.output, bytes, f.root);
      break;
    }
    case Collective::kAllgather:
      allgather(request, *job.decision);
      break;
    case Collective::kAlltoall:
      alltoall(request, *job.decision);
      break;
    case Collective::kReducescatter:
      reducescatter(request);
      break;
    case Collective::kReduce:
      communicator_.reduce_to(f.root, request.input, request.output, f.count(), reduction_of(f));
      break;
    case Collective::kGather:
      communicator_.gather(request.input, request.output, parts_of_all(f), f.root);
      break;
    case Collective::kScatter:
      communicator_.scatter(request.input, request.output, parts_of_all(f), f.root);
      break;
    case Collective::kBarrier:
    case Collective::kFence:
      communicator_.barrier();
      break;
    case Collective::kJoin:
      *static_cast<std::int64_t*>(request.output) = job.decision->last_joined;
      break;
  }
}

void Executor::run_inline(const Request& request, const Decision& decision) {
  const Fingerprint& f = request.fingerprint;
  if (is_barrier(f.collective)) return;

  const int size = communicator_.size();
  for (int rank = 0; rank < size; ++rank) {
    const std::size_t sent = at(decision.payloads, rank).size();
    const std::size_t expected = expected_bytes(f, decision, size, rank);
    if (sent != expected) {
      throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank) + " sent " +
                                            std::to_string(sent) + " bytes of " + f.describe() +
                                            ", not " + std::to_string(expected));
    }
  }

  const bool at_root = f.root == communicator_.rank();
  if (f.collective == Collective::kReduce || f.collective == Collective::kGather) {
    if (at_root) collect_inline(request, decision);
  } else if (f.collective == Collective::kScatter) {
    const std::size_t bytes = row_bytes_of(f);
    const ByteSpan part =
        at(decision.payloads, f.root)
            .subspan(static_cast<std::size_t>(communicator_.rank()) * bytes, bytes);
    concatenate(request.output, {&part, 1});
  } else if (reduces(f.collective)) {
    const bool scatters = f.collective == Collective::kReducescatter;
    std::size_t begin = 0;
    for (int rank = 0; scatters && rank < communicator_.rank(); ++rank) {
      begin += scattered_count(f, rank) * size_of(f.dtype);
    }
    inputs_.clear();
    for (const ByteSpan payload : decision.payloads) inputs_.push_back(payload.data() + begin);
    communicator_.reduce_inputs(inputs_, request.output,
                                scatters ? scattered_count(f, communicator_.rank()) : f.count(),
                                reduction_of(f));
  } else if (f.collective == Collective::kAlltoall) {
    std::vector<std::int64_t> received;
    std::vector<ByteSpan> parts;
    for (int rank = 0; rank < size; ++rank) {
      const std::int64_t* rows = decision.rows.data() + rank * size;
      const auto before = std::accumulate(rows, rows + communicator_.rank(), std::int64_t{0});
      received.push_back(rows[communicator_.rank()]);
      parts.push_back(at(decision.payloads, rank)
                          .subspan(static_cast<std::size_t>(before) * row_bytes_of(f),
                                   static_cast<std::size_t>(received.back()) * row_bytes_of(f)));
    }
    concatenate(request.allocate(received), parts);
  } else if (f.collective == Collective::kBroadcast) {
    const ByteSpan payload = at(decision.payloads, f.root);
    if (!payload.empty()) std::memcpy(request.output, payload.data(), payload.size());
  } else {
    concatenate(request.allocate(decision.rows), decision.payloads);
  }
}

/// The root's part of an inline reduce or gather.
void Executor::collect_inline(const Request& request, const Decision& decision) {
  const Fingerprint& f = request.fingerprint;
  if (f.collective == Collective::kGather) {
    concatenate(request.output, decision.payloads);
    return;
  }
  std::vector<const void*> inputs;
  for (const ByteSpan payload : decision.payloads) inputs.push_back(payload.data());
  communicator_.reduce_inputs(inputs, request.output, f.count(), reduction_of(f));
}

/// The bytes of each rank's part of a gather or scatter.
std::vector<std::size_t> Executor::parts_of_all(const Fingerprint& f) const {
  return std::vector<std::size_t>(static_cast<std::size_t>(communicator_.size()), row_bytes_of(f));
}

void Executor::allgather(const Request& request, const Decision& decision) {
  const Fingerprint& f = request.fingerprint;
  std::vector<std::size_t> bytes;
  for (const std::int64_t rows : decision.rows) {
    bytes.push_back(static_cast<std::size_t>(rows) * row_bytes_of(f));
  }
  communicator_.allgather(request.input, request.allocate(decision.rows), bytes);
}

void Executor::alltoall(const Request& request, const Decision& decision) {
  const auto size = static_cast<std::size_t>(communicator_.size());
  std::vector<std::size_t> bytes;
  for (const std::int64_t rows : decision.rows) {
    bytes.push_back(static_cast<std::size_t>(rows) * row_bytes_of(request.fingerprint));
  }
  std::vector<std::int64_t> received;
  for (std::size_t from = 0; from < size; ++from) {
    received.push_back(decision.rows[from * size + static_cast<std::size_t>(communicator_.rank())]);
  }
  communicator_.alltoall(request.input, request.allocate(received), bytes);
}

std::size_t Executor::scattered_count(const Fingerprint& f, int rank) const {
  const std::vector<std::int64_t> rows = scattered_rows(f.shape[0], communicator_.size());
  const std::size_t row = f.shape[0] == 0 ? 0 : f.count() / static_cast<std::size_t>(f.shape[0]);
  return static_cast<std::size_t>(at(rows, rank)) * row;
}

void Executor::reducescatter(const Request& request) {
  const Fingerprint& f = request.fingerprint;
  std::vector<std::size_t> counts;
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    counts.push_back(scattered_count(f, rank));
  }
  communicator_.reducescatter(request.input, request.output, counts, reduction_of(f));
}

void Executor::allreduce_fused(std::span<const Request* const> requests,
                               std::span<OperationTimes* const> times) {
  stamp(times, &OperationTimes::started);
  const Reduction reduction = reduction_of(requests.front()->fingerprint);
  if (reduction.op == ReduceOp::kAdasum) {
    adasum_fused(requests);
    return;
  }
  if (requests.size() == 1) {
    const Request& only = *requests.front();
    communicator_.allreduce(only.input, only.output, only.fingerprint.count(), reduction);
    return;
  }
  auto* const buffer = static_cast<std::byte*>(buffers_.fusion_buffer(bytes_of_all(requests)));
  std::vector<Copy> packing;
  std::vector<Copy> unpacking;
  std::size_t count = 0;
  for (const Request* request : requests) {
    std::byte* const packed = buffer + count * size_of(reduction.dtype);
    packing.push_back({packed, request->input, request->fingerprint.count()});
    unpacking.push_back({request->output, packed, request->fingerprint.count()});
    count += request->fingerprint.count();
  }
  buffers_.copy(packing, reduction.dtype);
  stamp(times, &OperationTimes::packed);
  communicator_.allreduce(buffer, buffer, count, reduction);
  stamp(times, &OperationTimes::reduced);
  buffers_.copy(unpacking, reduction.dtype);
}

void Executor::adasum_fused(std::span<const Request* const> requests) {
  const Fingerprint& first = requests.front()->fingerprint;
  // A reduction of one input is a copy with a factor.
  const auto copy = [&](void* to, const void* from, std::size_t count, double factor) {
    reduce({&to, 1}, {&from, 1}, count, {first.dtype, ReduceOp::kSum, {factor, 1.0, 1}});
  };
  auto* const buffer = static_cast<std::byte*>(buffers_.fusion_buffer(bytes_of_all(requests)));
  std::byte* at = buffer;
  std::vector<std::size_t> counts;
  for (const Request* request : requests) {
    counts.push_back(request->fingerprint.count());
    copy(at, request->input, counts.back(), first.prescale);
    at += request->input_bytes();
  }
  communicator_.adasum(buffer, counts, first.dtype);
  at = buffer;
  for (const Request* request : requests) {
    copy(request->output, at, request->fingerprint.count(), first.postscale);
    at += request->input_bytes();
  }
}

}  // namespace torch_ring
