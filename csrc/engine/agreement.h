// SPDX-License-Identifier: Apache-2.0
// Agreement: the decisions that follow from the announcements of all ranks. Pure: no I/O, no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/at.h"
#include "core/config.h"
#include "core/error.h"
#include "engine/entry.h"
#include "engine/request.h"

namespace torch_ring {

/// Rank `from` sends `sent` rows to rank `to`, which expects another number.
struct Misfit {
  int from;
  int to;
  std::int64_t sent;
  std::int64_t expected;
};

/// Compares the rows that ranks of an alltoall expect with those that the others send. Removes the
/// expected numbers from `rows`, which then has the rows that each rank sends to each. Returns the
/// first two ranks that differ. `rows`: for each rank those that it sends to each, and then those
/// that it expects from each. Leaves `rows` of another length as they are; the executor refuses
/// them.
std::optional<Misfit> take_expected(std::vector<std::int64_t>& rows, int size);

/// The error of an alltoall in which sent and expected rows differ; if they fit, removes the
/// expected ones from `rows` and returns nothing. `name_of`: a rank's name in errors.
std::optional<Error> misfit_of(const Fingerprint& fingerprint, std::vector<std::int64_t>& rows,
                               int size, const std::function<std::string(int)>& name_of);

/// The ranks' decision on a request that every rank has announced: it now runs, or fails if
/// `mismatch` is set.
struct Decision {
  std::string key;
  std::vector<std::int64_t> rows;            // of all ranks, in their order, without expected ones
  std::vector<std::int64_t> shared_offsets;  // of this host's ranks; empty unless all are shared
  std::vector<ByteSpan> payloads;            // by rank, if the data is inline and not a barrier's
  bool is_inline = false;                    // all data is inline
  std::optional<Error> mismatch;             // the ranks disagree; no data has moved
  std::vector<std::string> ended_groups;     // ... about the size of these groups (group_of())
  std::optional<Fingerprint> for_joined;     // some ranks have joined, and stand in for this
  int last_joined = -1;                      // of a join: the rank that joined last
  bool resets_numbering = false;             // every rank waits for this alone
  std::vector<int> last;  // the ranks that announced it in this round, if others had before
  // While a rank has joined, and on a device: the launches before it, modulo 2^32.
  std::uint32_t launches = 0;

  // Owns the payloads of earlier rounds; those of this round are borrowed.
  std::vector<std::shared_ptr<const void>> storage;
};

/// Builds the decision of a request that all ranks announce in one round from their announcements.
///
/// Thread: one. Blocking: no.
class Gathering {
 public:
  Gathering(const Round& round, Collective collective, Decision& decision)
      : round_(round), collective_(collective), decision_(decision) {}

  /// Takes the announcement of all ranks of a run.
  void add(const Run& run, const Announcement& announcement);

  /// `shared_before`: the number of buffers in shared memory that the entry announces before this
  /// one.
  void finish(std::size_t shared_before);

 private:
  const Round& round_;
  const Collective collective_;
  Decision& decision_;
  bool all_shared_ = true;
  bool all_inline_ = true;
};

/// Appends the rows of an announcement.
void append_rows(std::vector<std::int64_t>& rows, ByteSpan bytes);

/// Every rank feeds the same entries in the same order to its own Agreement, and so comes to the
/// same decisions in the same order, without a coordinator.
///
/// Ranks may announce requests in any order: the agreement matches them by key. It decides a
/// request in the round in which the last rank announces it. Decisions of one round come in the
/// order in which their requests were first announced.
///
/// The agreement no longer waits for a rank that has announced a join: it decides the others'
/// requests without that rank, which stands in with the identity of the reduction. It decides the
/// join when every rank has joined.
///
/// Cost of a round: O(runs) while the ranks are in step, otherwise O(ranks); and the rows and
/// payloads of all ranks.
///
/// Thread: one at a time. Blocking: no. Errors: Error(kInternal) on a broken entry.
class Agreement {
 public:
  /// `labels`: by rank, "rank 2 (10.0.0.7, pid 4711)".
  explicit Agreement(std::vector<std::string> labels, Words words = {});

  /// Takes the entries of one round. The payloads of the decisions are valid as long as the entries
  /// are.
  std::vector<Decision> round(const Round& round);

  /// The common case, with no table: the decision, without its key, if every rank announces exactly
  /// one request and all are equal. `own`: the request that this rank has announced. Only while
  /// empty().
  static std::optional<Decision> unanimous(const Fingerprint& own, const Round& round);

  /// Whether every announced request is decided.
  bool empty() const { return pending_.empty() && joined_count_ == 0; }

  bool has_joined(int rank) const { return at(joined_, rank); }

  /// The ranks that have not announced `key`.
  std::vector<int> missing(const std::string& key) const;

  /// The undecided requests of `rank`: "allreduce 'a' float32 [3] Sum and 2 more", or "" for none.
  std::string waits_for(int rank) const;

 private:
  struct Announced {  // an Announcement that outlives its round
    Bytes fingerprint;
    Bytes payload;
    Bytes rows;
    std::uint32_t launches;
    bool is_shared;
    bool is_inline;
    Called called;
    bool among_threads;
  };
  struct Pending {
    std::uint64_t since = 0;  // the number of requests first announced before this one
    std::vector<std::shared_ptr<const Announced>> by_rank;  // null: not yet announced
    std::map<int, std::int64_t> shared_offsets;             // by rank, of this host
    std::vector<int> latest;                                // those that announced it in this round
  };

  std::optional<std::vector<Decision>> in_step(const Round& round) const;
  void announce(const Run& run, const Announcement& announcement, std::size_t shared_before,
                const Round& round);
  bool complete(const Pending& pending) const;
  Decision decide(const std::string& key, Pending pending) const;
  std::string of_threads(const Pending& pending) const;
  std::optional<Error> misfit_of(const Fingerprint& fingerprint, Decision& decision) const;
  std::optional<Error> without_joined(const Fingerprint& fingerprint) const;
  void end_groups(std::vector<Decision>& decisions);
  Decision join();
  std::vector<Decision> deadlock();

  const int size_;
  const std::vector<std::string> labels_;
  const Words words_;
  std::map<std::string, Pending> pending_;
  std::uint64_t announcements_ = 0;
  std::vector<bool> joined_;  // by rank
  int joined_count_ = 0;
  int last_joined_ = -1;
};

/// "rank 2" of the label "rank 2 (10.0.0.7, pid 4711)".
std::string name_in(const std::string& label);

/// The key by which the ranks match a request: "<collective>.<name>", or its number.
std::string key_of(const Fingerprint& fingerprint);

/// The prefix of the keys of a group's members; empty for a request without a group.
std::string group_of(const Fingerprint& fingerprint);

}  // namespace torch_ring
