// SPDX-License-Identifier: Apache-2.0
// Entry: a rank's new requests, as bytes for the board.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collective/board.h"
#include "collective/communicator.h"
#include "engine/request.h"

namespace torch_ring {

using Bytes = std::vector<std::byte>;

/// One announced request. The spans point into the entry, whose parts (board.h) hold
///
///   common:  u32 flags (1: blocked, 2: shares the device) | u32 count of announcements; for each:
///            u32 bytes of the fingerprint | u32 count of rows | u32 flags | u32 launches |
///            fingerprint
///   own:     for each announcement: i64 rows... | if it has a payload: u64 bytes | payload
///   local:   for each announcement of a buffer in shared memory: i64 its offset
///
/// each padded to a multiple of 8 bytes. The ranks' entries are equal while they request the same
/// and send no data with it. Even the place of a rank's buffer makes no difference.
struct Announcement {
  ByteSpan fingerprint;             // encoded: equal bytes mean equal fingerprints
  ByteSpan payload;                 // the bytes of an inline tensor, else empty
  ByteSpan rows;                    // std::int64_t each: Request::rows
  std::uint32_t launches = 0;       // on a device: the rank's earlier launches, modulo 2^32
  bool is_shared = false;           // whether it reduces a buffer in shared memory in place,
  std::int64_t shared_offset = -1;  // ... at this offset; EntryReader leaves it out
  bool is_inline = false;           // whether its data is the payload (which may be empty)
  Called called = Called::kOwn;     // Fingerprint::called
  bool among_threads = false;       // whether it is one of several threads' requests without a name
};

/// Writes the encoding of a fingerprint to `bytes`, in place of their content.
void encode(const Fingerprint& fingerprint, Bytes& bytes);

/// The fingerprint of an encoding, without Fingerprint::called. Errors: Error(kInternal) on bytes
/// that encode() did not make.
Fingerprint decode(ByteSpan fingerprint);

/// The offset of a buffer in the local part of an entry that announces `before` others first.
/// Errors: Error(kInternal) if it is not there.
std::int64_t shared_offset(ByteSpan local, std::size_t before);

/// An entry under construction.
class EntryWriter {
 public:
  /// Begins an entry without announcements. The flags: see EntryReader.
  void clear(bool blocked, bool shares_device = false);
  void append(const Announcement& announcement);
  static std::size_t bytes_needed(const Announcement& announcement);

  Post post() const { return {common_, own_, local_}; }
  std::size_t bytes() const { return common_.size() + own_.size() + local_.size(); }
  std::size_t count() const { return count_; }

 private:
  Bytes common_;
  Bytes own_;
  Bytes local_;
  std::uint32_t count_ = 0;
};

/// Reads the announcements of a received entry, one after the other. Allocates nothing.
/// Errors: Error(kInternal) on bytes that EntryWriter did not make.
class EntryReader {
 public:
  EntryReader(ByteSpan common, ByteSpan own);

  /// Whether the rank has nothing new, and waits for a result (Driver::is_blocked()).
  bool blocked() const { return (flags_ & kBlocked) != 0; }
  /// Whether several process sets use the rank's devices: LaunchOrder::is_shared().
  bool shares_device() const { return (flags_ & kSharesDevice) != 0; }
  /// The announcements that next() has not returned yet.
  std::uint32_t left() const { return left_; }

  /// Precondition: left() > 0.
  Announcement next();

 private:
  friend class EntryWriter;
  static constexpr std::uint32_t kBlocked = 1;
  static constexpr std::uint32_t kSharesDevice = 2;

  void end_if_last() const;

  ByteSpan common_;  // the bytes that next() has not taken yet
  ByteSpan own_;
  std::uint32_t flags_;
  std::uint32_t left_;
};

/// The announcement of a request: its fingerprint, and its data if they are inline. `alone`: its
/// entry has no other. The spans point into the request and into `fingerprint`, which becomes the
/// encoded fingerprint. Thread: the progress thread. Blocking: no.
Announcement announce(const Request& request, bool alone, HostCommunicator& communicator,
                      Bytes& fingerprint);

/// The offset of the buffer of an in-place allreduce in shared memory, or -1: the other ranks of
/// the host write to it.
std::int64_t shared_offset(const Request& request, HostCommunicator& communicator);

/// Whether the tensor of a request is small enough to travel with the agreement, as the inline
/// payload of an entry. The limit is lower for a request that is not `alone`, because it can be
/// fused with the others.
bool fits_inline(const Request& request, bool alone, HostCommunicator& communicator);

/// Whether the ranks exchange the rows of this alltoall as data, after the agreement, because those
/// of so many ranks do not fit the entries of one round. The same on all ranks.
bool gathers_rows(const Request& request, HostCommunicator& communicator);

/// Gathers the rows of all ranks of such an alltoall. Collective.
std::vector<std::int64_t> gather_rows(const Request& request, Communicator& communicator);

}  // namespace torch_ring
