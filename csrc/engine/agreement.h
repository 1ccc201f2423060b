// Agreement: decides what is done next, from the announcements of all ranks. Pure: no I/O, no
// clock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/at.h"
#include "engine/entry.h"

namespace torch_ring {

/// A request that every rank has announced: run it, or fail it.
struct Decision {
  std::string key;
  std::vector<std::int64_t> rows;            // every rank's Request::rows, in the order of ranks
  std::vector<std::int64_t> shared_offsets;  // by rank; empty unless all buffers are shared
  std::vector<ByteSpan> payloads;            // by rank; empty unless all data is inline
  std::optional<Error> mismatch;             // set: the ranks disagree; no data has moved
  std::optional<Fingerprint> for_joined;     // set: what a rank that has joined stands in for
  int last_joined = -1;                      // of a join: the rank that was the last
  bool resets_numbering = false;             // every rank waits for this, and for nothing else

  std::vector<Bytes> storage;  // owns payloads of earlier rounds; those of this one are borrowed
};

/// Every rank feeds the same entries in the same order to its own Agreement and so comes to the
/// same decisions in the same order, without a coordinator.
///
/// Requests are matched by key, whatever order each rank announces them in. A decision is made in
/// the round in which the last rank announces; decisions of one round are ordered by who was
/// announced first.
///
/// A rank that has announced a join is waited for no more: what the others announce is decided
/// without it, and it stands in with the identity of the reduction. The join is decided when every
/// rank has joined.
///
/// Thread: one at a time. Blocking: no. Errors: Error(kInternal) on a broken entry.
class Agreement {
 public:
  /// `labels`: by rank, "rank 2 (10.0.0.7, pid 4711)".
  explicit Agreement(std::vector<std::string> labels);

  /// Takes the entries of one round, by rank. The payloads of the decisions are valid as long as
  /// the entries are.
  std::vector<Decision> round(std::span<const ByteSpan> entries);

  /// The common case, with no table: if nothing was pending, and every rank announces one request
  /// and all are equal to `own`, which this rank has announced, its decision, without the key.
  static std::optional<Decision> unanimous(const Fingerprint& own,
                                           std::span<const ByteSpan> entries);

  /// Whether nothing is announced that is not decided.
  bool empty() const { return pending_.empty() && joined_count_ == 0; }

  bool has_joined(int rank) const { return at(joined_, rank); }

  /// The ranks that have not announced `key`.
  std::vector<int> missing(const std::string& key) const;

  /// What `rank` has announced and still waits for: "allreduce 'a' float32 [3] Sum", or "nothing".
  std::string waits_for(int rank) const;

 private:
  struct Announced {  // an Announcement that outlives its round
    Bytes fingerprint;
    Bytes payload;
    Bytes rows;
    std::int64_t shared_offset;
    bool is_inline;
  };
  struct Pending {
    std::uint64_t since = 0;  // counts announcements
    std::vector<std::optional<Announced>> by_rank;
  };

  void announce(int rank, const Announcement& announcement);
  bool complete(const Pending& pending) const;
  Decision decide(const std::string& key, Pending pending) const;
  std::optional<Error> without_joined(const Fingerprint& fingerprint) const;
  Decision join();
  std::vector<Decision> deadlock();

  const int size_;
  const std::vector<std::string> labels_;
  std::map<std::string, Pending> pending_;
  std::uint64_t announcements_ = 0;
  std::vector<bool> joined_;  // by rank
  int joined_count_ = 0;
  int last_joined_ = -1;
};

/// "rank 2" of the label "rank 2 (10.0.0.7, pid 4711)".
std::string name_in(const std::string& label);

/// Under what the ranks match a request: "<collective>.<name>".
std::string key_of(const Fingerprint& fingerprint);

}  // namespace torch_ring
