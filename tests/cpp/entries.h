// SPDX-License-Identifier: Apache-2.0
// Entries and rounds for tests of the agreement.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/at.h"
#include "engine/agreement.h"

namespace torch_ring::test {

inline Fingerprint allreduce(const std::string& name, std::vector<std::int64_t> shape = {3}) {
  Fingerprint fingerprint;
  fingerprint.shape = std::move(shape);
  fingerprint.name = name;
  return fingerprint;
}

inline Fingerprint broadcast(const std::string& name, int root) {
  Fingerprint fingerprint = allreduce(name);
  fingerprint.collective = Collective::kBroadcast;
  fingerprint.root = root;
  return fingerprint;
}

/// The parts of a rank's entry.
struct Parts {
  Bytes common;
  Bytes own;
  Bytes local;
};

inline Parts parts_of(const EntryWriter& writer) {
  const auto copy = [](ByteSpan part) { return Bytes(part.begin(), part.end()); };
  const Post post = writer.post();
  return {copy(post.common), copy(post.own), copy(post.local)};
}

/// One request of an entry, with its rank's own data.
struct Asked {
  Fingerprint fingerprint;
  std::string payload = {};
  std::vector<std::int64_t> rows = {};
  std::int64_t shared_offset = -1;
  std::uint32_t launches = 0;
};

inline Parts entry_with(const std::vector<Asked>& requests, bool blocked = false) {
  EntryWriter writer;
  writer.clear(blocked);
  for (const Asked& request : requests) {
    Bytes fingerprint;
    encode(request.fingerprint, fingerprint);
    Announcement announcement;
    announcement.fingerprint = fingerprint;
    announcement.payload = std::as_bytes(std::span(request.payload));
    announcement.rows = std::as_bytes(std::span(request.rows));
    announcement.shared_offset = request.shared_offset;
    announcement.launches = request.launches;
    announcement.is_shared = request.shared_offset >= 0;
    announcement.is_inline = !request.payload.empty();
    writer.append(announcement);
  }
  return parts_of(writer);
}

/// A rank's entry with these requests.
inline Parts entry(const std::vector<Fingerprint>& requests, bool blocked = false) {
  std::vector<Asked> asked;
  for (const Fingerprint& request : requests) asked.push_back({request});
  return entry_with(asked, blocked);
}

/// A round of these entries, one for each rank. `host_ranks` share this rank's host; its caller's
/// entries outlive the round.
struct MadeRound {
  explicit MadeRound(const std::vector<Parts>& entries, std::vector<int> of_host = {})
      : host_ranks(std::move(of_host)) {
    for (const Parts& entry : entries) {
      if (!runs.empty() &&
          entry.common == entries[static_cast<std::size_t>(runs.back().first)].common &&
          entry.own == entries[static_cast<std::size_t>(runs.back().first)].own) {
        ++runs.back().count;
      } else {
        const int rank = static_cast<int>(&entry - entries.data());
        runs.push_back({rank, 1, entry.common, entry.own});
      }
    }
    for (const int rank : host_ranks) locals.push_back(at(entries, rank).local);
  }

  operator Round() const { return {runs, locals, host_ranks}; }

  std::vector<Run> runs;
  std::vector<int> host_ranks;
  std::vector<ByteSpan> locals;
};

inline std::vector<Decision> round(Agreement& agreement, const std::vector<Parts>& entries) {
  return agreement.round(MadeRound(entries));
}

inline std::vector<Announcement> read(const Parts& parts) {
  EntryReader reader(parts.common, parts.own);
  std::vector<Announcement> announcements;
  while (reader.left() > 0) announcements.push_back(reader.next());
  return announcements;
}

inline std::vector<std::string> texts(const std::vector<ByteSpan>& payloads) {
  std::vector<std::string> texts;
  for (const ByteSpan payload : payloads) {
    texts.emplace_back(reinterpret_cast<const char*>(payload.data()), payload.size());
  }
  return texts;
}

inline std::vector<std::string> keys(const std::vector<Decision>& decisions) {
  std::vector<std::string> keys;
  for (const Decision& decision : decisions) keys.push_back(decision.key);
  return keys;
}

using Keys = std::vector<std::string>;

inline Agreement among(int size) {
  std::vector<std::string> labels;
  for (int rank = 0; rank < size; ++rank) labels.push_back("rank " + std::to_string(rank));
  return Agreement(labels);
}

}  // namespace torch_ring::test
