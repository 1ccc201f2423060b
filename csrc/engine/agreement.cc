#include "engine/agreement.h"

#include <algorithm>
#include <cstring>

namespace torch_ring {

namespace {

/// Whether the engine made the name. It refuses users' names that begin like its own.
bool is_numbered(const std::string& name) { return name.starts_with('#'); }

/// Whether numbering begins anew: a rank that asks for a barrier without a name waits for it before
/// it asks for anything else.
bool resets_numbering(const Fingerprint& fingerprint) {
  return fingerprint.collective == Collective::kBarrier && is_numbered(fingerprint.name);
}

bool equal(ByteSpan a, ByteSpan b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

Bytes copy_of(ByteSpan bytes) { return {bytes.begin(), bytes.end()}; }

void append_rows(std::vector<std::int64_t>& rows, ByteSpan bytes) {
  if (bytes.empty()) return;
  const std::size_t count = rows.size();
  rows.resize(count + bytes.size() / sizeof(std::int64_t));
  std::memcpy(rows.data() + count, bytes.data(), bytes.size());
}

/// Appends one of `count` values; the first one reserves memory for all.
template <class T>
void append(std::vector<T>& values, const T& value, std::size_t count) {
  if (values.empty()) values.reserve(count);
  values.push_back(value);
}

}  // namespace

std::string name_in(const std::string& label) { return label.substr(0, label.find(" (")); }

Agreement::Agreement(std::vector<std::string> labels)
    : size_(static_cast<int>(labels.size())), labels_(std::move(labels)), joined_(labels_.size()) {}

std::string key_of(const Fingerprint& fingerprint) {
  if (fingerprint.collective == Collective::kJoin) return kJoinKey;
  // Requests without a name are matched by their number alone: when two ranks call different
  // collectives, both learn it from the first one.
  if (is_numbered(fingerprint.name)) return fingerprint.name;
  return std::string(name_of(fingerprint.collective)) + '.' + fingerprint.name;
}

std::vector<Decision> Agreement::round(std::span<const ByteSpan> entries) {
  if (const auto first = empty() ? parse_single(entries.front()) : std::nullopt) {
    const Fingerprint fingerprint = decode(first->fingerprint);
    if (auto decision = unanimous(fingerprint, entries)) {
      decision->key = key_of(fingerprint);
      std::vector<Decision> decisions;
      decisions.push_back(std::move(*decision));
      return decisions;
    }
  }

  bool nothing_new = true;
  bool all_blocked = true;
  for (int rank = 0; rank < size_; ++rank) {
    const Entry entry = parse_entry(at(entries, rank));
    nothing_new = nothing_new && entry.announcements.empty();
    all_blocked = all_blocked && entry.blocked;
    for (const Announcement& announcement : entry.announcements) announce(rank, announcement);
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
  }
  if (joined_count_ == size_) decisions.push_back(join());
  return decisions;
}

void Agreement::announce(int rank, const Announcement& a) {
  const Fingerprint fingerprint = decode(a.fingerprint);
  if (fingerprint.collective == Collective::kJoin) {
    at(joined_, rank) = true;
    ++joined_count_;
    last_joined_ = rank;
    return;
  }
  const std::string key = key_of(fingerprint);
  Pending& pending = pending_[key];
  if (pending.by_rank.empty()) {
    pending.since = announcements_++;
    pending.by_rank.resize(static_cast<std::size_t>(size_));
  }
  auto& announced = at(pending.by_rank, rank);
  if (announced) throw Error(ErrorKind::kInternal, "a rank announced " + key + " twice");
  announced = Announced{copy_of(a.fingerprint), copy_of(a.payload), copy_of(a.rows),
                        a.shared_offset, a.is_inline};
}

bool Agreement::complete(const Pending& pending) const {
  for (std::size_t rank = 0; rank < joined_.size(); ++rank) {
    if (!pending.by_rank[rank] && !joined_[rank]) return false;
  }
  return true;
}

std::optional<Decision> Agreement::unanimous(const Fingerprint& own,
                                             std::span<const ByteSpan> entries) {
  if (own.collective == Collective::kJoin) return std::nullopt;
  Decision decision;
  bool all_shared = true;
  bool all_inline = true;
  ByteSpan first;
  for (const ByteSpan entry : entries) {
    const auto a = parse_single(entry);
    if (!a) return std::nullopt;
    if (first.empty()) first = a->fingerprint;
    if (!equal(first, a->fingerprint)) return std::nullopt;
    append_rows(decision.rows, a->rows);
    all_shared = all_shared && a->shared_offset >= 0;
    all_inline = all_inline && a->is_inline;
    if (all_shared) append(decision.shared_offsets, a->shared_offset, entries.size());
    if (all_inline) append(decision.payloads, a->payload, entries.size());
  }
  if (!all_shared) decision.shared_offsets.clear();
  if (!all_inline) decision.payloads.clear();
  decision.resets_numbering = resets_numbering(own);
  return decision;
}

Decision Agreement::decide(const std::string& key, Pending pending) const {
  Decision decision;
  decision.key = key;
  bool all_shared = true;
  bool all_inline = true;
  const auto is_here = [](const auto& announced) { return announced.has_value(); };
  const auto reference = std::find_if(pending.by_rank.begin(), pending.by_rank.end(), is_here);
  const Bytes& first = (*reference)->fingerprint;
  const auto name_of_rank = [&](std::size_t rank) { return name_in(labels_[rank]); };
  for (std::size_t rank = 0; rank < pending.by_rank.size(); ++rank) {
    const auto& a = pending.by_rank[rank];
    if (!a) {
      decision.for_joined = decode(first);
      if (decision.for_joined->joinable) decision.rows.push_back(0);
      all_shared = all_inline = false;
      continue;
    }
    if (!decision.mismatch && !equal(first, a->fingerprint)) {
      decision.mismatch.emplace(
          ErrorKind::kMismatch,
          "the ranks disagree: " +
              name_of_rank(static_cast<std::size_t>(reference - pending.by_rank.begin())) + ": " +
              decode(first).describe() + "; " + name_of_rank(rank) + ": " +
              decode(a->fingerprint).describe() + ". " + kAllRanksMustCall +
              ", with the same shapes, dtypes and arguments");
    }
    append_rows(decision.rows, a->rows);
    decision.shared_offsets.push_back(a->shared_offset);
    all_shared = all_shared && a->shared_offset >= 0;
    all_inline = all_inline && a->is_inline;
  }
  decision.resets_numbering = resets_numbering(decode(first));
  if (decision.for_joined && !decision.mismatch) {
    decision.mismatch = without_joined(*decision.for_joined);
  }
  if (!all_shared) decision.shared_offsets.clear();
  if (all_inline) {
    for (auto& a : pending.by_rank) decision.storage.push_back(std::move(a->payload));
    decision.payloads.assign(decision.storage.begin(), decision.storage.end());
  }
  return decision;
}

/// The reason why the request cannot run without the ranks that have joined, or nothing if it can.
std::optional<Error> Agreement::without_joined(const Fingerprint& f) const {
  // A sum's identity is zero, whatever the factors.
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

/// Mismatches of all pending requests: every rank waits, none has anything new, so no other rank
/// will ever announce them.
std::vector<Decision> Agreement::deadlock() {
  std::string text = "the ranks wait for different collectives:";
  for (int rank = 0; rank < size_; ++rank) {
    text += (rank > 0 ? "; " : " ") + at(labels_, rank) + ": " + waits_for(rank);
  }
  text.append(". ").append(kAllRanksMustCall);
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
    const bool announced = key != kJoinKey && at(pending->second.by_rank, rank).has_value();
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
      text = decode(announced->fingerprint).describe();
    } else {
      ++more;
    }
  }
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}

}  // namespace torch_ring
