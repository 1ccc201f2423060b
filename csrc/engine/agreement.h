// Agreement: the decisions that follow from the announcements of all ranks. Pure: no I/O, no clock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/at.h"
#include "engine/decision.h"
#include "engine/entry.h"

namespace torch_ring {

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
/// Cost of a round: O(runs) while the ranks are in step, and what the rows and payloads of all
/// ranks cost; O(ranks) else.
///
/// Thread: one at a time. Blocking: no. Errors: Error(kInternal) on a broken entry.
class Agreement {
 public:
  /// `labels`: by rank, "rank 2 (10.0.0.7, pid 4711)".
  explicit Agreement(std::vector<std::string> labels);

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
  };
  struct Pending {
    std::uint64_t since = 0;  // the number of requests that were first announced earlier
    std::vector<std::shared_ptr<const Announced>> by_rank;  // null: not yet announced
    std::map<int, std::int64_t> shared_offsets;             // by rank, of this host
    std::vector<int> latest;                                // who has announced it in this round
  };

  std::optional<std::vector<Decision>> in_step(const Round& round) const;
  void announce(const Run& run, const Announcement& announcement, std::size_t shared_before,
                const Round& round);
  bool complete(const Pending& pending) const;
  Decision decide(const std::string& key, Pending pending) const;
  std::optional<Error> misfit_of(const Fingerprint& fingerprint, Decision& decision) const;
  std::optional<Error> without_joined(const Fingerprint& fingerprint) const;
  void end_groups(std::vector<Decision>& decisions);
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

/// The key by which the ranks match a request: "<collective>.<name>", or its number.
std::string key_of(const Fingerprint& fingerprint);

/// What the keys of a group's members begin with; empty for a request that is in no group.
std::string group_of(const Fingerprint& fingerprint);

}  // namespace torch_ring
