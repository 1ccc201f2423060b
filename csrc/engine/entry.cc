// SPDX-License-Identifier: Apache-2.0
#include "engine/entry.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "core/failpoint.h"

namespace torch_ring {

namespace {

struct EntryHeader {
  std::uint32_t flags;
  std::uint32_t count;
};

constexpr std::uint32_t kInline = 1;
constexpr std::uint32_t kPayload = 2;  // not set for an empty payload, such as a barrier's
constexpr std::uint32_t kShared = 4;
constexpr std::uint32_t kAmongThreads = 8;
constexpr std::uint32_t kCalledShift = 8;  // the bits from here on: Called

struct AnnouncementHeader {
  std::uint32_t fingerprint_bytes;
  std::uint32_t row_count;
  std::uint32_t flags;
  std::uint32_t launches;
};

// The header of an encoded fingerprint; the shape and the name follow. All padding is explicit and
// zero, because fingerprints are compared as bytes.
struct FingerprintHeader {
  double prescale;
  double postscale;
  std::int32_t root;
  std::uint32_t dimensions;
  std::uint32_t name_bytes;
  std::uint32_t group;
  Collective collective;
  DType dtype;
  ReduceOp op;
  std::uint8_t device;
  std::uint8_t joinable;
  std::uint8_t tells_expected;
  std::array<std::uint8_t, 2> zero;
};
static_assert(sizeof(FingerprintHeader) == 40);

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 7) / 8 * 8; }

/// Copies `count` bytes to `to` and returns the end of the copy.
std::byte* put(std::byte* to, const void* data, std::size_t count) {
  if (count > 0) std::memcpy(to, data, count);
  return to + count;
}

[[noreturn]] void refuse() { throw Error(ErrorKind::kInternal, "a rank posted a broken entry"); }

/// Takes `bytes` bytes and their padding off the front of untrusted ones.
ByteSpan take(ByteSpan& left, std::size_t bytes) {
  if (bytes > left.size()) refuse();
  const ByteSpan taken = left.first(bytes);
  left = left.subspan(std::min(padded(bytes), left.size()));
  return taken;
}

template <class T>
T take(ByteSpan& left) {
  static_assert(sizeof(T) % 8 == 0);
  T value;
  std::memcpy(&value, take(left, sizeof value).data(), sizeof value);
  return value;
}

/// Appends `count` zeros, and returns their beginning.
std::byte* grow(Bytes& bytes, std::size_t count) {
  bytes.resize(bytes.size() + count);
  return bytes.data() + bytes.size() - count;
}

/// Whether a header has only values that encode() writes. The executor relies on it: it chooses
/// the arithmetic by dtype and op.
bool valid(const FingerprintHeader& header) {
  return header.collective <= Collective::kJoin && static_cast<int>(header.op) < kReduceOpCount &&
         static_cast<int>(header.dtype) < kDTypeCount &&
         (!reduces(header.collective) || can_reduce(header.dtype, header.op)) &&
         header.joinable <= 1 && header.tells_expected <= 1 &&
         std::ranges::all_of(header.zero, [](std::uint8_t byte) { return byte == 0; });
}

/// Whether `shape` is valid, without an overflow of its bytes: a rank that has joined allocates the
/// tensors that the others announce.
bool valid(const std::vector<std::int64_t>& shape, DType dtype) {
  if (std::ranges::any_of(shape, [](std::int64_t extent) { return extent < 0; })) return false;
  if (std::ranges::find(shape, 0) != shape.end()) return true;
  std::int64_t most =
      std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(size_of(dtype));
  for (const std::int64_t extent : shape) most /= extent;
  return most > 0;
}

}  // namespace

void encode(const Fingerprint& f, Bytes& bytes) {
  const FingerprintHeader header{f.prescale,
                                 f.postscale,
                                 f.root,
                                 static_cast<std::uint32_t>(f.shape.size()),
                                 static_cast<std::uint32_t>(f.name.size()),
                                 f.group,
                                 f.collective,
                                 f.dtype,
                                 f.op,
                                 f.device,
                                 f.joinable,
                                 f.tells_expected,
                                 {}};
  const std::size_t shape_bytes = f.shape.size() * sizeof(std::int64_t);
  bytes.resize(sizeof header + shape_bytes + f.name.size());
  std::byte* at = put(bytes.data(), &header, sizeof header);
  at = put(at, f.shape.data(), shape_bytes);
  put(at, f.name.data(), f.name.size());
}

Fingerprint decode(ByteSpan fingerprint) {
  const auto header = take<FingerprintHeader>(fingerprint);
  if (!valid(header)) refuse();
  Fingerprint f;
  f.collective = header.collective;
  f.dtype = header.dtype;
  f.op = header.op;
  f.device = header.device;
  f.joinable = header.joinable != 0;
  f.tells_expected = header.tells_expected != 0;
  f.group = header.group;
  f.root = header.root;
  f.prescale = header.prescale;
  f.postscale = header.postscale;
  const ByteSpan shape = take(fingerprint, std::size_t{header.dimensions} * sizeof(std::int64_t));
  f.shape.resize(header.dimensions);
  if (!shape.empty()) std::memcpy(f.shape.data(), shape.data(), shape.size());
  if (!valid(f.shape, f.dtype)) refuse();
  if (fingerprint.size() != header.name_bytes) refuse();
  const ByteSpan name = fingerprint;
  f.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  return f;
}

std::int64_t shared_offset(ByteSpan local, std::size_t before) {
  take(local, before * sizeof(std::int64_t));
  const auto offset = take<std::int64_t>(local);
  if (offset < 0) throw Error(ErrorKind::kInternal, "a rank posted a broken entry");
  return offset;
}

void EntryWriter::clear(bool blocked, bool shares_device) {
  count_ = 0;
  const std::uint32_t flags =
      (blocked ? EntryReader::kBlocked : 0) | (shares_device ? EntryReader::kSharesDevice : 0);
  const EntryHeader header{flags, 0};
  common_.resize(sizeof header);
  put(common_.data(), &header, sizeof header);
  own_.clear();
  local_.clear();
}

void EntryWriter::append(const Announcement& a) {
  const std::uint32_t flags = (a.is_inline ? kInline : 0) | (a.payload.empty() ? 0 : kPayload) |
                              (a.is_shared ? kShared : 0) | (a.among_threads ? kAmongThreads : 0) |
                              (static_cast<std::uint32_t>(a.called) << kCalledShift);
  const AnnouncementHeader header{static_cast<std::uint32_t>(a.fingerprint.size()),
                                  static_cast<std::uint32_t>(a.rows.size() / sizeof(std::int64_t)),
                                  flags, a.launches};
  std::byte* at = grow(common_, sizeof header + padded(a.fingerprint.size()));
  at = put(at, &header, sizeof header);
  put(at, a.fingerprint.data(), a.fingerprint.size());
  if (!a.payload.empty()) {
    const std::uint64_t bytes = a.payload.size();
    at = put(grow(own_, a.rows.size() + sizeof bytes), a.rows.data(), a.rows.size());
    put(at, &bytes, sizeof bytes);
    own_.insert(own_.end(), a.payload.begin(), a.payload.end());
    grow(own_, padded(bytes) - bytes);
  } else if (!a.rows.empty()) {
    put(grow(own_, a.rows.size()), a.rows.data(), a.rows.size());
  }
  if (a.is_shared) {
    put(grow(local_, sizeof a.shared_offset), &a.shared_offset, sizeof a.shared_offset);
  }
  ++count_;
  put(common_.data() + offsetof(EntryHeader, count), &count_, sizeof count_);
}

std::size_t EntryWriter::bytes_needed(const Announcement& a) {
  return sizeof(AnnouncementHeader) + padded(a.fingerprint.size()) + a.rows.size() +
         (a.payload.empty() ? 0 : sizeof(std::uint64_t) + padded(a.payload.size())) +
         (a.is_shared ? sizeof a.shared_offset : 0);
}

EntryReader::EntryReader(ByteSpan common, ByteSpan own) : common_(common), own_(own) {
  const auto header = take<EntryHeader>(common_);
  flags_ = header.flags;
  left_ = header.count;
  end_if_last();
}

Announcement EntryReader::next() {
  --left_;
  const auto header = take<AnnouncementHeader>(common_);
  Announcement announcement;
  announcement.fingerprint = take(common_, header.fingerprint_bytes);
  if (header.row_count > 0) {
    announcement.rows = take(own_, header.row_count * sizeof(std::int64_t));
  }
  announcement.launches = header.launches;
  announcement.is_inline = (header.flags & kInline) != 0;
  if ((header.flags & kPayload) != 0) {
    const auto bytes = take<std::uint64_t>(own_);
    announcement.payload = take(own_, bytes);
  }
  announcement.is_shared = (header.flags & kShared) != 0;
  announcement.among_threads = (header.flags & kAmongThreads) != 0;
  const std::uint32_t called = header.flags >> kCalledShift;
  if (called > static_cast<std::uint32_t>(Called::kBarrier)) refuse();
  announcement.called = static_cast<Called>(called);
  end_if_last();
  return announcement;
}

/// Checks that nothing follows the last announcement.
void EntryReader::end_if_last() const {
  if (left_ == 0 && !(common_.empty() && own_.empty())) refuse();
}

namespace {

// The most bytes of a payload whose entry announces other requests, too, because they can be fused.
constexpr std::size_t kInlineAmongOthers = 4u << 10;

// The most bytes of all ranks' payloads of one request, because every rank reads them all.
constexpr std::size_t kInlineBytesOfAllRanks = 64u << 10;

/// The bytes of the longest rank's inline payload.
std::size_t payload_bytes(const Request& request, int size) {
  const bool scatters = traits_of(request.fingerprint.collective).sends == Sends::kOfRootForEach;
  return request.input_bytes() * (scatters ? static_cast<std::size_t>(size) : 1);
}

/// The payload of an inline request: this rank's tensor, or nothing.
ByteSpan inline_payload(const Request& request, const Communicator& communicator) {
  const Fingerprint& f = request.fingerprint;
  const Sends sends = traits_of(f.collective).sends;
  const bool from_root = sends == Sends::kOfRoot || sends == Sends::kOfRootForEach;
  const bool silent = sends == Sends::kNothing || (from_root && f.root != communicator.rank());
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
  announcement.called = request.fingerprint.called;
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
  if (!in_place || !communicator.has_shared_memory()) return -1;
  return communicator.shared_offset_of(request.input, request.input_bytes());
}

bool fits_inline(const Request& request, bool alone, HostCommunicator& communicator) {
  const Fingerprint& f = request.fingerprint;
  if (traits_of(f.collective).sends == Sends::kNothing) return true;
  if (f.op == ReduceOp::kAdasum || !f.on_host()) return false;
  const std::size_t bytes = payload_bytes(request, communicator.size());
  const std::size_t limit = communicator.board().inline_limit();
  return bytes <= (alone ? limit : std::min(limit, kInlineAmongOthers)) &&
         bytes * static_cast<std::size_t>(communicator.size()) <= kInlineBytesOfAllRanks;
}

bool gathers_rows(const Request& request, HostCommunicator& communicator) {
  if (request.fingerprint.collective != Collective::kAlltoall) return false;
  // The other half is for the rest of the entry.
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
