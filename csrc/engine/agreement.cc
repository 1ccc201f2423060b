// SPDX-License-Identifier: Apache-2.0
#include "engine/agreement.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_ring {

std::optional<Misfit> take_expected(std::vector<std::int64_t>& rows, int size) {
  const auto each = static_cast<std::size_t>(size);
  std::optional<Misfit> misfit;
  if (rows.size() != 2 * each * each) return misfit;
  std::vector<std::int64_t> all_sent;
  all_sent.reserve(each * each);
  for (std::size_t from = 0; from < each; ++from) {
    for (std::size_t to = 0; to < each; ++to) {
      const std::int64_t sent = rows[2 * each * from + to];
      const std::int64_t expected = rows[2 * each * to + each + from];
      all_sent.push_back(sent);
      if (sent != expected && !misfit) {
        misfit = Misfit{static_cast<int>(from), static_cast<int>(to), sent, expected};
      }
    }
  }
  rows = std::move(all_sent);
  return misfit;
}

std::optional<Error> misfit_of(const Fingerprint& fingerprint, std::vector<std::int64_t>& rows,
                               int size, const std::function<std::string(int)>& name_of) {
  if (!fingerprint.tells_expected) return std::nullopt;
  const std::optional<Misfit> misfit = take_expected(rows, size);
  if (!misfit) return std::nullopt;
  return Error(ErrorKind::kMismatch,
               "the ranks' splits do not fit: " + name_of(misfit->from) + " sends " +
                   std::to_string(misfit->sent) +
                   (fingerprint.shape.empty() ? " elements to " : " rows to ") +
                   name_of(misfit->to) + ", which expects " + std::to_string(misfit->expected));
}

void append_rows(std::vector<std::int64_t>& rows, ByteSpan bytes) {
  if (bytes.empty()) return;
  const std::size_t count = rows.size();
  rows.resize(count + bytes.size() / sizeof(std::int64_t));
  std::memcpy(rows.data() + count, bytes.data(), bytes.size());
}

void Gathering::add(const Run& run, const Announcement& a) {
  if (!a.rows.empty()) {
    for (int i = 0; i < run.count; ++i) append_rows(decision_.rows, a.rows);
  }
  all_shared_ = all_shared_ && a.is_shared;
  all_inline_ = all_inline_ && a.is_inline;
  if (!all_inline_ || is_barrier(collective_)) return;
  const Run& last = round_.runs.back();
  if (decision_.payloads.empty()) {
    decision_.payloads.reserve(static_cast<std::size_t>(last.first + last.count));
  }
  decision_.payloads.insert(decision_.payloads.end(), static_cast<std::size_t>(run.count),
                            a.payload);
}

void Gathering::finish(std::size_t shared_before) {
  decision_.is_inline = all_inline_;
  if (!all_inline_) decision_.payloads.clear();
  if (all_shared_) {
    for (const ByteSpan local : round_.locals) {
      decision_.shared_offsets.push_back(shared_offset(local, shared_before));
    }
  }
}

namespace {

/// Whether the engine made the name. The engine refuses users' names that begin like its own.
bool is_numbered(const std::string& name) { return name.starts_with('#'); }

/// Whether the numbering begins anew: a rank that requests a barrier without a name waits for it
/// before its next request. A fence is one of the numbered requests.
bool resets_numbering(const Fingerprint& fingerprint) {
  return fingerprint.collective == Collective::kBarrier && is_numbered(fingerprint.name);
}

bool equal(ByteSpan a, ByteSpan b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

Bytes copy_of(ByteSpan bytes) { return {bytes.begin(), bytes.end()}; }

/// Whether a rank launched number `a` after number `b`. Numbers wrap around.
bool is_later(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

bool equal_commons(std::span<const Run> runs) {
  return std::all_of(runs.begin(), runs.end(), [&](const Run& run) {
    return run.common.data() == runs.front().common.data() ||
           equal(run.common, runs.front().common);
  });
}

}  // namespace

std::string name_in(const std::string& label) { return label.substr(0, label.find(" (")); }

Agreement::Agreement(std::vector<std::string> labels, Words words)
    : size_(static_cast<int>(labels.size())),
      labels_(std::move(labels)),
      words_(std::move(words)),
      joined_(labels_.size()) {}

std::string key_of(const Fingerprint& fingerprint) {
  if (fingerprint.collective == Collective::kJoin) return kJoinKey;
  // Requests without a name are matched by their number alone, so that ranks that call different
  // collectives get the mismatch at the first one.
  if (is_numbered(fingerprint.name)) return fingerprint.name;
  return std::string(name_of(fingerprint.collective)) + '.' + fingerprint.name;
}

std::string group_of(const Fingerprint& fingerprint) {
  if (fingerprint.group == 0) return "";
  const std::string key = key_of(fingerprint);
  return key.substr(0, key.rfind(is_numbered(fingerprint.name) ? '/' : '.'));
}

std::vector<Decision> Agreement::round(const Round& round) {
  if (auto decisions = in_step(round)) return std::move(*decisions);

  const std::uint64_t earlier = announcements_;
  for (auto& [key, pending] : pending_) pending.latest.clear();
  bool nothing_new = true;
  bool all_blocked = true;
  for (const Run& run : round.runs) {
    EntryReader entry(run.common, run.own);
    nothing_new = nothing_new && entry.left() == 0;
    all_blocked = all_blocked && entry.blocked();
    std::size_t shared_before = 0;
    while (entry.left() > 0) {
      const Announcement announcement = entry.next();
      announce(run, announcement, shared_before, round);
      if (announcement.is_shared) ++shared_before;
    }
  }
  if (nothing_new && all_blocked) return deadlock();

  std::vector<std::pair<std::uint64_t, std::string>> ready;
  for (const auto& [key, pending] : pending_) {
    if (complete(pending)) ready.emplace_back(pending.since, key);
  }
  std::sort(ready.begin(), ready.end());
  std::vector<Decision> decisions;
  for (const auto& [since, key] : ready) {
    decisions.push_back(decide(key, std::move(pending_.extract(key).mapped())));
    if (since >= earlier) decisions.back().last.clear();  // all have announced it in this round
  }
  end_groups(decisions);
  if (joined_count_ == size_) decisions.push_back(join());
  return decisions;
}

/// The decisions of a round in which all ranks announce the same new requests, and none a join;
/// nothing for other rounds. Requests of earlier rounds stay undecided.
std::optional<std::vector<Decision>> Agreement::in_step(const Round& round) const {
  if (joined_count_ > 0 || !equal_commons(round.runs)) return std::nullopt;
  std::vector<EntryReader> entries;
  for (const Run& run : round.runs) entries.emplace_back(run.common, run.own);
  if (entries.front().left() == 0) return std::nullopt;

  std::vector<Decision> decisions;
  std::size_t shared_before = 0;
  while (entries.front().left() > 0) {
    Decision& decision = decisions.emplace_back();
    std::optional<Gathering> gathering;
    Fingerprint fingerprint;
    bool is_shared = false;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const Announcement announcement = entries[i].next();
      if (!gathering) {
        fingerprint = decode(announcement.fingerprint);
        gathering.emplace(round, fingerprint.collective, decision);
        is_shared = announcement.is_shared;
      }
      gathering->add(round.runs[i], announcement);
    }
    const std::string key = key_of(fingerprint);
    if (fingerprint.collective == Collective::kJoin || pending_.contains(key)) return std::nullopt;
    gathering->finish(shared_before);
    decision.mismatch = misfit_of(fingerprint, decision);
    decision.key = key;
    decision.resets_numbering = resets_numbering(fingerprint);
    if (is_shared) ++shared_before;
  }
  return decisions;
}

/// Takes the announcement of all ranks of a run.
void Agreement::announce(const Run& run, const Announcement& a, std::size_t shared_before,
                         const Round& round) {
  const Fingerprint fingerprint = decode(a.fingerprint);
  const std::string key = key_of(fingerprint);
  const auto twice = [&] {
    return Error(ErrorKind::kInternal, "a rank announced " + key + " twice");
  };
  const int end = run.first + run.count;
  if (fingerprint.collective == Collective::kJoin) {
    for (int rank = run.first; rank < end; ++rank) {
      if (has_joined(rank)) throw twice();
      at(joined_, rank) = true;
    }
    joined_count_ += run.count;
    last_joined_ = end - 1;
    return;
  }
  Pending& pending = pending_[key];
  if (pending.by_rank.empty()) {
    pending.since = announcements_++;
    pending.by_rank.resize(static_cast<std::size_t>(size_));
  }
  const auto announced = std::make_shared<const Announced>(
      Announced{copy_of(a.fingerprint), copy_of(a.payload), copy_of(a.rows), a.launches,
                a.is_shared, a.is_inline, a.called, a.among_threads});
  for (int rank = run.first; rank < end; ++rank) {
    auto& place = at(pending.by_rank, rank);
    if (place) throw twice();
    place = announced;
  }
  for (int rank = run.first; rank < end; ++rank) pending.latest.push_back(rank);
  for (std::size_t i = 0; a.is_shared && i < round.locals.size(); ++i) {
    const int rank = round.host_ranks[i];
    if (rank < run.first || rank >= end) continue;
    pending.shared_offsets[rank] = shared_offset(round.locals[i], shared_before);
  }
}

bool Agreement::complete(const Pending& pending) const {
  for (std::size_t rank = 0; rank < joined_.size(); ++rank) {
    if (!pending.by_rank[rank] && !joined_[rank]) return false;
  }
  return true;
}

std::optional<Decision> Agreement::unanimous(const Fingerprint& own, const Round& round) {
  std::optional<Decision> decision;
  if (own.collective == Collective::kJoin) return decision;
  Gathering gathering(round, own.collective, decision.emplace());
  ByteSpan first;
  for (const Run& run : round.runs) {
    EntryReader entry(run.common, run.own);
    if (entry.left() == 1) {
      const Announcement announcement = entry.next();
      if (first.empty()) first = announcement.fingerprint;
      if (equal(first, announcement.fingerprint)) {
        gathering.add(run, announcement);
        continue;
      }
    }
    decision.reset();
    return decision;
  }
  gathering.finish(0);
  if (own.collective == Collective::kAlltoall) {
    const Run& last = round.runs.back();
    const bool fits =
        !own.tells_expected || !take_expected(decision->rows, last.first + last.count);
    if (!fits || decision->rows.empty()) {  // round() reports the misfit
      decision.reset();
      return decision;
    }
  }
  decision->resets_numbering = resets_numbering(own);
  return decision;
}

Decision Agreement::decide(const std::string& key, Pending pending) const {
  Decision decision;
  decision.key = key;
  decision.last = std::move(pending.latest);
  bool all_shared = true;
  bool all_inline = true;
  const auto is_here = [](const auto& announced) { return announced != nullptr; };
  const auto reference = std::find_if(pending.by_rank.begin(), pending.by_rank.end(), is_here);
  const Bytes& first = (*reference)->fingerprint;
  decision.launches = (*reference)->launches;
  std::optional<std::size_t> present;  // the first rank that has announced it, and not joined
  const auto name_of_rank = [&](std::size_t rank) { return name_in(labels_[rank]); };
  for (std::size_t rank = 0; rank < pending.by_rank.size(); ++rank) {
    const auto& a = pending.by_rank[rank];
    if (!a) {
      decision.for_joined = decode(first);
      if (decision.for_joined->joinable) decision.rows.push_back(0);
      all_shared = all_inline = false;
      continue;
    }
    const auto reference_name = [&] {
      return name_of_rank(static_cast<std::size_t>(reference - pending.by_rank.begin()));
    };
    if (!decision.mismatch && a != *reference && !equal(first, a->fingerprint)) {
      Fingerprint one = decode(first);
      one.called = (*reference)->called;
      Fingerprint other = decode(a->fingerprint);
      other.called = a->called;
      if (one.group != other.group) decision.ended_groups = {group_of(one), group_of(other)};
      decision.mismatch.emplace(
          ErrorKind::kMismatch,
          "the ranks disagree: " + reference_name() + ": " + one.describe() + "; " +
              name_of_rank(rank) + ": " + other.describe() + ". " + kAllRanksMustCall +
              ", with the same shapes, dtypes and arguments" + of_threads(pending));
    }
    // A rank that has joined has launched more since, at the others' passes.
    if (is_later(a->launches, decision.launches)) decision.launches = a->launches;
    if (!present && !joined_[rank]) present = rank;
    const auto other = [&] { return pending.by_rank[*present]->launches; };
    if (!decision.mismatch && !joined_[rank] && a->launches != other()) {
      decision.mismatch.emplace(
          ErrorKind::kMismatch,
          "the ranks have run ahead of it differently: " + name_of_rank(*present) +
              " has launched " + std::to_string(other()) + " reductions on its device before it, " +
              name_of_rank(rank) + " " + std::to_string(a->launches) +
              ". With run_ahead=False (or TORCH_RING_RUN_AHEAD=0) they agree on each pass, and an "
              "error names the first difference");
    }
    append_rows(decision.rows, a->rows);
    all_shared = all_shared && a->is_shared;
    all_inline = all_inline && a->is_inline;
  }
  const Fingerprint fingerprint = decode(first);
  decision.resets_numbering = resets_numbering(fingerprint);
  if (decision.for_joined && !decision.mismatch) {
    decision.mismatch = without_joined(*decision.for_joined);
  }
  if (!decision.mismatch) decision.mismatch = misfit_of(fingerprint, decision);
  if (all_shared) {
    for (const auto& [rank, offset] : pending.shared_offsets) {
      decision.shared_offsets.push_back(offset);
    }
  }
  decision.is_inline = all_inline;
  if (all_inline) {
    for (const auto& a : pending.by_rank) {
      decision.payloads.push_back(a->payload);
      decision.storage.push_back(a);
    }
  }
  return decision;
}

/// The advice to threads of one rank that have requested this, and others without a name, at once;
/// empty if there are none.
std::string Agreement::of_threads(const Pending& pending) const {
  const auto found = std::ranges::find_if(
      pending.by_rank, [](const auto& announced) { return announced && announced->among_threads; });
  if (found == pending.by_rank.end()) return "";
  return ". Operations of this " + words_.whole + " come from two threads of " +
         name_in(at(labels_, found - pending.by_rank.begin())) + ": " + words_.threads;
}

/// If the ranks disagree about the size of a group, adds mismatches for its other members, of which
/// some ranks never announce the last ones.
void Agreement::end_groups(std::vector<Decision>& decisions) {
  for (std::size_t i = 0, decided = decisions.size(); i < decided; ++i) {
    for (const std::string& group : std::vector(decisions[i].ended_groups)) {
      if (group.empty()) continue;
      std::erase_if(pending_, [&](const auto& entry) {
        const auto& [key, pending] = entry;
        const bool member = std::ranges::any_of(pending.by_rank, [&](const auto& announced) {
          return announced && group_of(decode(announced->fingerprint)) == group;
        });
        if (member) {
          Decision& last = decisions.emplace_back();
          last.key = key;
          last.mismatch = decisions[i].mismatch;
        }
        return member;
      });
    }
  }
}

std::optional<Error> Agreement::misfit_of(const Fingerprint& f, Decision& decision) const {
  return torch_ring::misfit_of(f, decision.rows, size_,
                               [&](int rank) { return name_in(at(labels_, rank)); });
}

/// The error if the request cannot run without the ranks that have joined; nothing if it can.
std::optional<Error> Agreement::without_joined(const Fingerprint& f) const {
  // A sum's identity is zero for all factors.
  const bool sums =
      f.op == ReduceOp::kSum || f.op == ReduceOp::kAverage || f.op == ReduceOp::kAdasum;
  const bool can_stand_in =
      f.joinable || (f.collective == Collective::kAllreduce && (sums || f.prescale == 1.0));
  if (can_stand_in) return std::nullopt;
  std::string text = "it needs data of every rank, but these have called join():";
  for (std::size_t rank = 0; rank < joined_.size(); ++rank) {
    if (joined_[rank]) text += " " + labels_[rank];
  }
  return Error(ErrorKind::kMismatch, text);
}

/// The decision of the join, when every rank has joined.
Decision Agreement::join() {
  Decision decision;
  decision.key = kJoinKey;
  decision.last_joined = last_joined_;
  decision.resets_numbering = true;
  joined_.assign(joined_.size(), false);
  joined_count_ = 0;
  return decision;
}

/// Mismatches of all pending requests: every rank waits and has nothing new, so no other rank will
/// ever announce them.
std::vector<Decision> Agreement::deadlock() {
  std::string text = "the ranks wait for different collectives:";
  for (int rank = 0; rank < size_; ++rank) {
    text += (rank > 0 ? "; " : " ") + at(labels_, rank) + ": " + waits_for(rank);
  }
  text.append(". ").append(kAllRanksMustCall);
  std::string of_threads;
  for (const auto& [key, pending] : pending_) {
    if (of_threads.empty()) of_threads = this->of_threads(pending);
  }
  text += of_threads;
  std::vector<Decision> decisions;
  for (auto& [key, pending] : pending_) {
    Decision decision;
    decision.key = key;
    decision.resets_numbering = decisions.empty();
    decision.mismatch.emplace(ErrorKind::kMismatch, text);
    decisions.push_back(std::move(decision));
  }
  pending_.clear();
  return decisions;
}

std::vector<int> Agreement::missing(const std::string& key) const {
  std::vector<int> ranks;
  const auto pending = pending_.find(key);
  if (pending == pending_.end() && key != kJoinKey) return ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (has_joined(rank)) continue;
    const bool announced = key != kJoinKey && at(pending->second.by_rank, rank) != nullptr;
    if (!announced) ranks.push_back(rank);
  }
  return ranks;
}

std::string Agreement::waits_for(int rank) const {
  std::string text = has_joined(rank) ? kJoinKey : "";
  int more = 0;
  for (const auto& [key, pending] : pending_) {
    const auto& announced = at(pending.by_rank, rank);
    if (!announced) continue;
    if (text.empty()) {
      Fingerprint fingerprint = decode(announced->fingerprint);
      fingerprint.called = announced->called;
      text = fingerprint.describe();
    } else {
      ++more;
    }
  }
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}

}  // namespace torch_ring
