#include "engine/executor.h"

#include <array>
#include <cstring>
#include <numeric>

namespace torch_ring {

namespace {

// Reading n entries of this size costs every rank less than a second synchronisation would.
constexpr std::size_t kCarriedBytes = 4096;
constexpr std::size_t kCarriedBytesOfAllRanks = 64u << 10;

/// Bytes of this rank's tensor.
std::size_t bytes_of(const Request& request) {
  const Fingerprint& f = request.fingerprint;
  const std::size_t rows =
      f.collective == Collective::kAllgather ? static_cast<std::size_t>(request.rows) : 1;
  return rows * f.count() * size_of(f.dtype);
}

}  // namespace

bool Executor::rides_along(const Request& request, int size) {
  if (request.fingerprint.collective == Collective::kBarrier) return true;
  const std::size_t bytes = bytes_of(request);
  return bytes <= kCarriedBytes &&
         bytes * static_cast<std::size_t>(size) <= kCarriedBytesOfAllRanks;
}

ByteSpan Executor::payload_of(const Request& request, int rank) {
  const Fingerprint& f = request.fingerprint;
  const bool silent = f.collective == Collective::kBarrier ||
                      (f.collective == Collective::kBroadcast && f.root != rank);
  if (silent) return {};
  return {static_cast<const std::byte*>(request.input), bytes_of(request)};
}

std::int64_t Executor::shared_offset(const Request& request) const {
  const bool in_place =
      request.fingerprint.collective == Collective::kAllreduce && request.input == request.output;
  return in_place ? communicator_.shared_offset(request.input, bytes_of(request)) : -1;
}

bool Executor::fuses(const Job& job) {
  return job.request->fingerprint.collective == Collective::kAllreduce &&
         job.decision->payloads.empty() && job.decision->shared_offsets.empty();
}

Reduction Executor::reduction_of(const Fingerprint& f) const {
  Reduction reduction{f.dtype, f.op, {f.prescale, f.postscale, 1}};
  if (f.op == ReduceOp::kAverage) {
    reduction.op = ReduceOp::kSum;
    reduction.scaling.divisor = communicator_.size();
  }
  return reduction;
}

void Executor::run_one(const Job& job) {
  const Request& request = *job.request;
  const Fingerprint& f = request.fingerprint;
  if (!job.decision->payloads.empty()) {
    run_carried(request, *job.decision);
    return;
  }
  switch (f.collective) {
    case Collective::kAllreduce:
      communicator_.allreduce(request.input, request.output, f.count(), reduction_of(f),
                              job.decision->shared_offsets);
      break;
    case Collective::kBroadcast: {
      const std::size_t bytes = bytes_of(request);
      if (f.root == communicator_.rank() && request.output != request.input) {
        std::memcpy(request.output, request.input, bytes);
      }
      communicator_.broadcast(request.output, bytes, f.root);
      break;
    }
    case Collective::kAllgather:
      allgather(request, *job.decision);
      break;
    case Collective::kBarrier:
      communicator_.barrier();
      break;
  }
}

void Executor::run_carried(const Request& request, const Decision& decision) {
  const Fingerprint& f = request.fingerprint;
  if (f.collective == Collective::kBarrier) return;

  const std::size_t row_bytes = f.count() * size_of(f.dtype);
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    std::size_t expected = row_bytes;
    if (f.collective == Collective::kAllgather) {
      expected *= static_cast<std::size_t>(decision.rows[index]);
    } else if (f.collective == Collective::kBroadcast && rank != f.root) {
      expected = 0;
    }
    if (decision.payloads[index].size() != expected) {
      throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank) + " sent " +
                                            std::to_string(decision.payloads[index].size()) +
                                            " bytes of " + f.describe() + ", not " +
                                            std::to_string(expected));
    }
  }

  if (f.collective == Collective::kAllreduce) {
    std::vector<const void*> inputs;
    for (const ByteSpan payload : decision.payloads) inputs.push_back(payload.data());
    const std::array<void*, 1> outputs{request.output};
    reduce(outputs, inputs, f.count(), reduction_of(f));
  } else if (f.collective == Collective::kBroadcast) {
    const ByteSpan payload = decision.payloads[static_cast<std::size_t>(f.root)];
    if (!payload.empty()) std::memcpy(request.output, payload.data(), payload.size());
  } else {
    auto* output = static_cast<std::byte*>(request.allocate(decision.rows));
    for (const ByteSpan payload : decision.payloads) {
      if (!payload.empty()) std::memcpy(output, payload.data(), payload.size());
      output += payload.size();
    }
  }
}

void Executor::allgather(const Request& request, const Decision& decision) {
  const Fingerprint& f = request.fingerprint;
  std::vector<std::size_t> bytes;
  for (const std::int64_t rows : decision.rows) {
    bytes.push_back(static_cast<std::size_t>(rows) * f.count() * size_of(f.dtype));
  }
  communicator_.allgather(request.input, request.allocate(decision.rows), bytes);
}

void Executor::allreduce_fused(std::span<const Request* const> requests) {
  const Reduction reduction = reduction_of(requests.front()->fingerprint);
  if (requests.size() == 1) {
    const Request& only = *requests.front();
    communicator_.allreduce(only.input, only.output, only.fingerprint.count(), reduction);
    return;
  }
  const std::size_t bytes = std::accumulate(
      requests.begin(), requests.end(), std::size_t{0},
      [](std::size_t sum, const Request* request) { return sum + bytes_of(*request); });
  if (fusion_buffer_.size() < bytes) fusion_buffer_.resize(bytes);
  std::byte* at = fusion_buffer_.data();
  for (const Request* request : requests) {
    std::memcpy(at, request->input, bytes_of(*request));
    at += bytes_of(*request);
  }
  communicator_.allreduce(fusion_buffer_.data(), fusion_buffer_.data(),
                          bytes / size_of(reduction.dtype), reduction);
  at = fusion_buffer_.data();
  for (const Request* request : requests) {
    std::memcpy(request->output, at, bytes_of(*request));
    at += bytes_of(*request);
  }
}

}  // namespace torch_ring
