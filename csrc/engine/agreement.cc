#include "engine/agreement.h"

#include <algorithm>
#include <cstring>

namespace torch_ring {

namespace {

/// The first of the names that the engine makes; a user's name cannot collide with it, because the
/// engine refuses such names.
bool is_numbered(const std::string& name) { return name.starts_with('#'); }

bool equal(ByteSpan a, ByteSpan b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

Bytes copy_of(ByteSpan bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

std::string key_of(const Fingerprint& fingerprint) {
  // Requests without a name are matched by their number alone: when two ranks call different
  // collectives, both learn it from the first one.
  if (is_numbered(fingerprint.name)) return fingerprint.name;
  return std::string(name_of(fingerprint.collective)) + '.' + fingerprint.name;
}

std::vector<Decision> Agreement::round(std::span<const ByteSpan> entries) {
  if (pending_.empty()) {
    if (auto decision = unanimous(entries)) {
      std::vector<Decision> decisions;
      decisions.push_back(std::move(*decision));
      return decisions;
    }
  }

  std::vector<std::pair<std::uint64_t, std::string>> complete;
  bool nothing_new = true;
  bool all_blocked = true;
  for (int rank = 0; rank < size_; ++rank) {
    const Entry entry = parse_entry(entries[static_cast<std::size_t>(rank)]);
    nothing_new = nothing_new && entry.announcements.empty();
    all_blocked = all_blocked && entry.blocked;
    for (const Announcement& a : entry.announcements) {
      std::string key = key_of(decode(a.fingerprint));
      Pending& pending = pending_[key];
      if (pending.by_rank.empty()) {
        pending.since = announcements_++;
        pending.by_rank.resize(static_cast<std::size_t>(size_));
      }
      auto& announced = pending.by_rank[static_cast<std::size_t>(rank)];
      if (announced) throw Error(ErrorKind::kInternal, "a rank announced " + key + " twice");
      announced =
          Announced{copy_of(a.fingerprint), copy_of(a.payload), a.rows, a.shared_offset, a.carries};
      if (++pending.count == size_) complete.emplace_back(pending.since, std::move(key));
    }
  }
  if (nothing_new && all_blocked) return deadlock();

  std::sort(complete.begin(), complete.end());
  std::vector<Decision> decisions;
  for (const auto& [since, key] : complete) {
    decisions.push_back(decide(key, std::move(pending_.extract(key).mapped())));
  }
  return decisions;
}

/// The common case, with no table: every rank announces one request, and all are equal.
std::optional<Decision> Agreement::unanimous(std::span<const ByteSpan> entries) const {
  Decision decision;
  bool all_shared = true;
  bool all_carry = true;
  ByteSpan first;
  for (const ByteSpan entry : entries) {
    const auto a = parse_single(entry);
    if (!a) return std::nullopt;
    if (first.empty()) first = a->fingerprint;
    if (!equal(first, a->fingerprint)) return std::nullopt;
    decision.rows.push_back(a->rows);
    decision.shared_offsets.push_back(a->shared_offset);
    decision.payloads.push_back(a->payload);
    all_shared = all_shared && a->shared_offset >= 0;
    all_carry = all_carry && a->carries;
  }
  if (!all_shared) decision.shared_offsets.clear();
  if (!all_carry) decision.payloads.clear();
  decision.key = key_of(decode(first));
  return decision;
}

Decision Agreement::decide(const std::string& key, Pending pending) const {
  Decision decision;
  decision.key = key;
  bool all_shared = true;
  bool all_carry = true;
  const Bytes& first = pending.by_rank[0]->fingerprint;
  for (int rank = 0; rank < size_; ++rank) {
    Announced& a = *pending.by_rank[static_cast<std::size_t>(rank)];
    if (rank > 0 && !decision.mismatch && !equal(first, a.fingerprint)) {
      decision.mismatch.emplace(ErrorKind::kMismatch,
                                "the ranks disagree: rank 0: " + decode(first).describe() +
                                    "; rank " + std::to_string(rank) + ": " +
                                    decode(a.fingerprint).describe());
    }
    decision.rows.push_back(a.rows);
    decision.shared_offsets.push_back(a.shared_offset);
    all_shared = all_shared && a.shared_offset >= 0;
    all_carry = all_carry && a.carries;
  }
  if (!all_shared) decision.shared_offsets.clear();
  if (all_carry) {
    for (auto& a : pending.by_rank) decision.storage.push_back(std::move(a->payload));
    decision.payloads.assign(decision.storage.begin(), decision.storage.end());
  }
  return decision;
}

/// Every rank waits, nobody has anything new: what is pending can never be matched.
std::vector<Decision> Agreement::deadlock() {
  std::string text = "the ranks wait for different collectives:";
  for (int rank = 0; rank < size_; ++rank) {
    text +=
        (rank > 0 ? "; " : " ") + labels_[static_cast<std::size_t>(rank)] + ": " + waits_for(rank);
  }
  std::vector<Decision> decisions;
  for (auto& [key, pending] : pending_) {
    Decision decision;
    decision.key = key;
    decision.mismatch.emplace(ErrorKind::kMismatch, text);
    decisions.push_back(std::move(decision));
  }
  pending_.clear();
  return decisions;
}

std::vector<int> Agreement::missing(const std::string& key) const {
  std::vector<int> ranks;
  const auto pending = pending_.find(key);
  if (pending == pending_.end()) return ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (!pending->second.by_rank[static_cast<std::size_t>(rank)]) ranks.push_back(rank);
  }
  return ranks;
}

std::string Agreement::waits_for(int rank) const {
  std::string text;
  int more = 0;
  for (const auto& [key, pending] : pending_) {
    const auto& announced = pending.by_rank[static_cast<std::size_t>(rank)];
    if (!announced) continue;
    if (text.empty()) {
      text = decode(announced->fingerprint).describe();
    } else {
      ++more;
    }
  }
  if (text.empty()) return "nothing";
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}

}  // namespace torch_ring
