#include "engine/entry.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace torch_ring {

namespace {

constexpr std::uint32_t kBlocked = 1;
constexpr std::uint32_t kNoPayload = ~std::uint32_t{0};

struct EntryHeader {
  std::uint32_t flags;
  std::uint32_t count;
};

struct AnnouncementHeader {
  std::uint32_t fingerprint_bytes;
  std::uint32_t payload_bytes;  // kNoPayload: the tensor is not inline
  std::uint32_t row_count;
  std::uint32_t reserved;
  std::int64_t shared_offset;
};

// The begin of an encoded fingerprint; the shape and the name follow. All padding is explicit and
// zero, because fingerprints are compared as bytes.
struct FingerprintHeader {
  double prescale;
  double postscale;
  std::int32_t root;
  std::uint32_t dimensions;
  std::uint32_t name_bytes;
  Collective collective;
  DType dtype;
  ReduceOp op;
  std::uint8_t device;
  std::uint8_t joinable;
  std::array<std::uint8_t, 7> zero;
};
static_assert(sizeof(FingerprintHeader) == 40);

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 7) / 8 * 8; }

/// Copies `count` bytes to `to` and returns the end of the copy.
std::byte* put(std::byte* to, const void* data, std::size_t count) {
  if (count > 0) std::memcpy(to, data, count);
  return to + count;
}

[[noreturn]] void refuse() { throw Error(ErrorKind::kInternal, "a rank posted a broken entry"); }

/// Takes values off the front of untrusted bytes.
class Reader {
 public:
  explicit Reader(ByteSpan bytes) : left_(bytes) {}

  ByteSpan take(std::size_t bytes) {
    if (bytes > left_.size()) refuse();
    const ByteSpan taken = left_.first(bytes);
    left_ = left_.subspan(bytes);
    return taken;
  }

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  Announcement take_announcement() {
    const auto header = take<AnnouncementHeader>();
    Announcement announcement;
    announcement.rows = take(header.row_count * sizeof(std::int64_t));
    announcement.shared_offset = header.shared_offset;
    announcement.fingerprint =
        take(padded(header.fingerprint_bytes)).first(header.fingerprint_bytes);
    announcement.is_inline = header.payload_bytes != kNoPayload;
    if (announcement.is_inline) {
      announcement.payload = take(padded(header.payload_bytes)).first(header.payload_bytes);
    }
    return announcement;
  }

  /// Checks that nothing is left.
  void end() const {
    if (!left_.empty()) refuse();
  }

 private:
  ByteSpan left_;
};

/// Whether a header has only values that encode() writes. What runs a request relies on it: it
/// chooses the arithmetic by dtype and op.
bool valid(const FingerprintHeader& header) {
  return header.collective <= Collective::kJoin && header.op <= ReduceOp::kProduct &&
         static_cast<int>(header.dtype) < kDTypeCount && header.joinable <= 1 &&
         std::ranges::all_of(header.zero, [](std::uint8_t byte) { return byte == 0; });
}

/// Whether `shape` is a tensor's, with a number of bytes: a rank that has joined allocates what the
/// others announce.
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
                                 f.collective,
                                 f.dtype,
                                 f.op,
                                 f.device,
                                 f.joinable,
                                 {}};
  const std::size_t shape_bytes = f.shape.size() * sizeof(std::int64_t);
  bytes.resize(sizeof header + shape_bytes + f.name.size());
  std::byte* at = put(bytes.data(), &header, sizeof header);
  at = put(at, f.shape.data(), shape_bytes);
  put(at, f.name.data(), f.name.size());
}

Fingerprint decode(ByteSpan fingerprint) {
  Reader reader(fingerprint);
  const auto header = reader.take<FingerprintHeader>();
  if (!valid(header)) refuse();
  Fingerprint f;
  f.collective = header.collective;
  f.dtype = header.dtype;
  f.op = header.op;
  f.device = header.device;
  f.joinable = header.joinable != 0;
  f.root = header.root;
  f.prescale = header.prescale;
  f.postscale = header.postscale;
  const ByteSpan shape = reader.take(std::size_t{header.dimensions} * sizeof(std::int64_t));
  f.shape.resize(header.dimensions);
  if (!shape.empty()) std::memcpy(f.shape.data(), shape.data(), shape.size());
  if (!valid(f.shape, f.dtype)) refuse();
  const ByteSpan name = reader.take(header.name_bytes);
  f.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  reader.end();
  return f;
}

void EntryWriter::clear(bool blocked) {
  count_ = 0;
  const EntryHeader header{blocked ? kBlocked : 0, 0};
  bytes_.resize(sizeof header);
  put(bytes_.data(), &header, sizeof header);
}

void EntryWriter::append(const Announcement& a) {
  const AnnouncementHeader header{
      static_cast<std::uint32_t>(a.fingerprint.size()),
      a.is_inline ? static_cast<std::uint32_t>(a.payload.size()) : kNoPayload,
      static_cast<std::uint32_t>(a.rows.size() / sizeof(std::int64_t)), 0, a.shared_offset};
  const std::size_t begin = bytes_.size();
  bytes_.resize(begin + bytes_needed(a));  // with zeros where there is padding
  std::byte* at = put(bytes_.data() + begin, &header, sizeof header);
  at = put(at, a.rows.data(), a.rows.size());
  put(at, a.fingerprint.data(), a.fingerprint.size());
  put(at + padded(a.fingerprint.size()), a.payload.data(), a.payload.size());
  ++count_;
  put(bytes_.data() + offsetof(EntryHeader, count), &count_, sizeof count_);
}

std::size_t EntryWriter::bytes_needed(const Announcement& a) {
  return sizeof(AnnouncementHeader) + a.rows.size() + padded(a.fingerprint.size()) +
         padded(a.payload.size());
}

Entry parse_entry(ByteSpan bytes) {
  Reader reader(bytes);
  const auto header = reader.take<EntryHeader>();
  Entry entry;
  entry.blocked = (header.flags & kBlocked) != 0;
  for (std::uint32_t i = 0; i < header.count; ++i) {
    entry.announcements.push_back(reader.take_announcement());
  }
  reader.end();
  return entry;
}

std::optional<Announcement> parse_single(ByteSpan bytes) {
  Reader reader(bytes);
  if (reader.take<EntryHeader>().count != 1) return std::nullopt;
  const Announcement announcement = reader.take_announcement();
  reader.end();
  return announcement;
}

}  // namespace torch_ring
