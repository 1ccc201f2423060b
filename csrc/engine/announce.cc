#include "engine/announce.h"

#include <algorithm>

#include "core/failpoint.h"

namespace torch_ring {

namespace {

// Bytes of a payload whose entry announces other requests too: those can be fused.
constexpr std::size_t kInlineAmongOthers = 4u << 10;

// Bytes of all ranks' payloads of one request: every rank reads them all.
constexpr std::size_t kInlineBytesOfAllRanks = 64u << 10;

/// The bytes of the longest rank's inline payload.
std::size_t payload_bytes(const Request& request, int size) {
  const bool scatters = request.fingerprint.collective == Collective::kScatter;
  return request.input_bytes() * (scatters ? static_cast<std::size_t>(size) : 1);
}

/// The payload of an inline request: this rank's tensor, or nothing.
ByteSpan inline_payload(const Request& request, const Communicator& communicator) {
  const Fingerprint& f = request.fingerprint;
  const bool from_root =
      f.collective == Collective::kBroadcast || f.collective == Collective::kScatter;
  const bool silent = is_barrier(f.collective) || f.collective == Collective::kJoin ||
                      (from_root && f.root != communicator.rank());
  if (silent) return {};
  return {static_cast<const std::byte*>(request.input),
          payload_bytes(request, communicator.size())};
}

}  // namespace

Announcement announce(const Request& request, bool alone, HostCommunicator& communicator,
                      Bytes& fingerprint) {
  encode(request.fingerprint, fingerprint);
  Announcement announcement;
  announcement.fingerprint = fingerprint;
  announcement.is_inline = fits_inline(request, alone, communicator);
  if (!request.rows.empty()) [[unlikely]] {
    if (gathers_rows(request, communicator)) {
      announcement.is_inline = false;
    } else {
      announcement.rows = std::as_bytes(std::span(request.rows));
    }
  }
  if (announcement.is_inline) {
    announcement.payload = inline_payload(request, communicator);
  }
  announcement.shared_offset = shared_offset(request, communicator);
  announcement.is_shared = announcement.shared_offset >= 0;
  return announcement;
}

std::int64_t shared_offset(const Request& request, HostCommunicator& communicator) {
  const Fingerprint& f = request.fingerprint;
  const bool in_place = f.collective == Collective::kAllreduce && f.op != ReduceOp::kAdasum &&
                        f.on_host() && request.input == request.output;
  if (!in_place) return -1;
  const SharedBuffers* const shared = communicator.shared_buffers();
  return shared ? shared->offset_of(request.input, request.input_bytes()) : -1;
}

bool fits_inline(const Request& request, bool alone, HostCommunicator& communicator) {
  const Fingerprint& f = request.fingerprint;
  if (is_barrier(f.collective) || f.collective == Collective::kJoin) return true;
  if (f.op == ReduceOp::kAdasum || !f.on_host()) return false;
  const std::size_t bytes = payload_bytes(request, communicator.size());
  const std::size_t limit = communicator.board().inline_limit();
  return bytes <= (alone ? limit : std::min(limit, kInlineAmongOthers)) &&
         bytes * static_cast<std::size_t>(communicator.size()) <= kInlineBytesOfAllRanks;
}

bool gathers_rows(const Request& request, HostCommunicator& communicator) {
  if (request.fingerprint.collective != Collective::kAlltoall) return false;
  // Half of it is left for the rest of the entry.
  return request.rows.size() * sizeof(std::int64_t) > communicator.board().safe_capacity() / 2 ||
         failpoint("alltoall.rows", communicator.rank());
}

std::vector<std::int64_t> gather_rows(const Request& request, Communicator& communicator) {
  const auto size = static_cast<std::size_t>(communicator.size());
  std::vector<std::int64_t> rows(size * request.rows.size());
  const std::vector<std::size_t> bytes(size, request.rows.size() * sizeof(std::int64_t));
  communicator.allgather(request.rows.data(), rows.data(), bytes);
  return rows;
}

}  // namespace torch_ring
