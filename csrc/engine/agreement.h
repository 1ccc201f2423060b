// Decides from what all ranks have announced what is done next. Pure: no I/O, no clock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/entry.h"

namespace torch_ring {

/// A request that every rank has announced: run it, or fail it.
struct Decision {
  std::string key;
  std::vector<std::int64_t> rows;            // of an allgather, by rank
  std::vector<std::int64_t> shared_offsets;  // by rank; empty unless all buffers are shared
  std::vector<ByteSpan> payloads;            // by rank; empty unless all data rode along
  std::optional<Error> mismatch;             // set: the ranks disagree; no data has moved

  std::vector<Bytes> storage;  // owns payloads of earlier rounds; those of this one are borrowed
};

/// Every rank feeds the same entries in the same order to its own Agreement and so comes to the
/// same decisions in the same order, without a coordinator.
///
/// Requests are matched by key, whatever order each rank announces them in. A decision is made in
/// the round in which the last rank announces; decisions of one round are ordered by who was
/// announced first.
///
/// Thread: one at a time. Blocking: no. Errors: Error(kInternal) on a broken entry.
class Agreement {
 public:
  Agreement(int size, std::vector<std::string> labels) : size_(size), labels_(std::move(labels)) {}

  /// Takes the entries of one round, by rank. The payloads of the decisions are valid as long as
  /// the entries are.
  std::vector<Decision> round(std::span<const ByteSpan> entries);

  /// Whether nothing is announced that is not decided.
  bool empty() const { return pending_.empty(); }

  /// The ranks that have not announced `key`.
  std::vector<int> missing(const std::string& key) const;

  /// What `rank` has announced and still waits for: "allreduce 'a' float32 [3] Sum", or "nothing".
  std::string waits_for(int rank) const;

 private:
  struct Announced {  // an Announcement that outlives its round
    Bytes fingerprint;
    Bytes payload;
    std::int64_t rows;
    std::int64_t shared_offset;
    bool carries;
  };
  struct Pending {
    std::uint64_t since = 0;  // counts announcements
    std::vector<std::optional<Announced>> by_rank;
    int count = 0;
  };

  std::optional<Decision> unanimous(std::span<const ByteSpan> entries) const;
  Decision decide(const std::string& key, Pending pending) const;
  std::vector<Decision> deadlock();

  const int size_;
  const std::vector<std::string> labels_;
  std::map<std::string, Pending> pending_;
  std::uint64_t announcements_ = 0;
};

/// Under what the ranks match a request: "<collective>.<name>".
std::string key_of(const Fingerprint& fingerprint);

}  // namespace torch_ring
