#include "engine/entry.h"

#include <cstring>

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
  std::uint32_t payload_bytes;  // kNoPayload: the tensor does not ride along
  std::uint32_t row_count;
  std::uint32_t reserved;
  std::int64_t shared_offset;
};

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 7) / 8 * 8; }

void append(Bytes& bytes, const void* data, std::size_t count) {
  const auto* from = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), from, from + count);
}

template <class T>
void append(Bytes& bytes, const T& value) {
  append(bytes, &value, sizeof value);
}

/// Takes values off the front of untrusted bytes.
class Reader {
 public:
  explicit Reader(ByteSpan bytes) : left_(bytes) {}

  ByteSpan take(std::size_t bytes) {
    if (bytes > left_.size()) throw Error(ErrorKind::kInternal, "a rank posted a broken entry");
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
    announcement.carries = header.payload_bytes != kNoPayload;
    if (announcement.carries) {
      announcement.payload = take(padded(header.payload_bytes)).first(header.payload_bytes);
    }
    return announcement;
  }

 private:
  ByteSpan left_;
};

}  // namespace

Bytes encode(const Fingerprint& f) {
  Bytes bytes;
  bytes.reserve(40 + 8 * f.shape.size() + f.name.size());
  append(bytes, f.collective);
  append(bytes, f.dtype);
  append(bytes, f.op);
  append(bytes, f.device);
  append(bytes, f.joinable);
  append(bytes, f.root);
  append(bytes, f.prescale);
  append(bytes, f.postscale);
  append(bytes, static_cast<std::uint32_t>(f.shape.size()));
  append(bytes, static_cast<std::uint32_t>(f.name.size()));
  append(bytes, f.shape.data(), f.shape.size() * sizeof(std::int64_t));
  append(bytes, f.name.data(), f.name.size());
  return bytes;
}

Fingerprint decode(ByteSpan fingerprint) {
  Reader reader(fingerprint);
  Fingerprint f;
  f.collective = reader.take<Collective>();
  f.dtype = reader.take<DType>();
  f.op = reader.take<ReduceOp>();
  f.device = reader.take<std::uint8_t>();
  f.joinable = reader.take<std::uint8_t>() != 0;
  f.root = reader.take<std::int32_t>();
  f.prescale = reader.take<double>();
  f.postscale = reader.take<double>();
  const auto dimensions = reader.take<std::uint32_t>();
  const auto name_bytes = reader.take<std::uint32_t>();
  const ByteSpan shape = reader.take(std::size_t{dimensions} * sizeof(std::int64_t));
  f.shape.resize(dimensions);
  if (dimensions > 0) std::memcpy(f.shape.data(), shape.data(), shape.size());
  const ByteSpan name = reader.take(name_bytes);
  f.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  return f;
}

void EntryWriter::clear(bool blocked) {
  bytes_.clear();
  count_ = 0;
  torch_ring::append(bytes_, EntryHeader{blocked ? kBlocked : 0, 0});
}

void EntryWriter::append(const Announcement& a) {
  const AnnouncementHeader header{
      static_cast<std::uint32_t>(a.fingerprint.size()),
      a.carries ? static_cast<std::uint32_t>(a.payload.size()) : kNoPayload,
      static_cast<std::uint32_t>(a.rows.size() / sizeof(std::int64_t)), 0, a.shared_offset};
  torch_ring::append(bytes_, header);
  torch_ring::append(bytes_, a.rows.data(), a.rows.size());
  torch_ring::append(bytes_, a.fingerprint.data(), a.fingerprint.size());
  bytes_.resize(padded(bytes_.size()));
  torch_ring::append(bytes_, a.payload.data(), a.payload.size());
  bytes_.resize(padded(bytes_.size()));
  ++count_;
  std::memcpy(bytes_.data() + offsetof(EntryHeader, count), &count_, sizeof count_);
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
  return entry;
}

std::optional<Announcement> parse_single(ByteSpan bytes) {
  Reader reader(bytes);
  if (reader.take<EntryHeader>().count != 1) return std::nullopt;
  return reader.take_announcement();
}

}  // namespace torch_ring
