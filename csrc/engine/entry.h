// Entry: the new requests of a rank, as the bytes that it posts to the board.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"

namespace torch_ring {

using Bytes = std::vector<std::byte>;
using ByteSpan = std::span<const std::byte>;

/// One request as its rank announces it. The spans point into the entry, which holds it as
///
///   u32 bytes of the fingerprint | u32 bytes of the payload | u32 count of rows | u32 0
///   i64 shared offset | i64 rows... | fingerprint | payload; each padded to a multiple of 8 bytes
struct Announcement {
  ByteSpan fingerprint;             // encoded: equal bytes mean equal fingerprints
  ByteSpan payload;                 // the bytes of an inline tensor, else empty
  ByteSpan rows;                    // std::int64_t each: Request::rows
  std::int64_t shared_offset = -1;  // of an in-place buffer in shared memory, or -1
  bool is_inline = false;           // whether there is a payload (it may be empty)
};

/// Writes the encoding of a fingerprint to `bytes`, in place of their content.
void encode(const Fingerprint& fingerprint, Bytes& bytes);

/// The fingerprint of an encoding. Errors: Error(kInternal) on bytes that encode() did not make.
Fingerprint decode(ByteSpan fingerprint);

/// An entry under construction.
class EntryWriter {
 public:
  /// Begins an entry without announcements. `blocked`: see Entry.
  void clear(bool blocked);
  void append(const Announcement& announcement);
  static std::size_t bytes_needed(const Announcement& announcement);

  ByteSpan bytes() const { return bytes_; }
  std::size_t count() const { return count_; }

 private:
  Bytes bytes_;
  std::uint32_t count_ = 0;
};

/// A received entry. Every size is checked before it is used.
struct Entry {
  bool blocked = false;  // the rank has nothing new, and its only thread waits for a result
  std::vector<Announcement> announcements;
};

/// The entry in received bytes. Errors: Error(kInternal) if they are not an entry.
Entry parse_entry(ByteSpan bytes);

/// The announcement of an entry that has exactly one, or nothing. Allocates nothing.
std::optional<Announcement> parse_single(ByteSpan bytes);

}  // namespace torch_ring
