// Decision: what the ranks have agreed on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/entry.h"

namespace torch_ring {

/// A request that every rank has announced, and that now runs, or fails if `mismatch` is set.
struct Decision {
  std::string key;
  std::vector<std::int64_t> rows;            // of all ranks, in their order; not what they expect
  std::vector<std::int64_t> shared_offsets;  // of this host's ranks; empty unless all are shared
  std::vector<ByteSpan> payloads;            // by rank, if the data is inline and not a barrier's
  bool is_inline = false;                    // all data is inline
  std::optional<Error> mismatch;             // the ranks disagree; no data has moved
  std::vector<std::string> ended_groups;     // ... about the size of these groups (group_of())
  std::optional<Fingerprint> for_joined;     // some ranks have joined: they stand in for this
  int last_joined = -1;                      // of a join: the rank that joined last
  bool resets_numbering = false;             // every rank waits for this, and for nothing else
  std::vector<int> last;  // who announced it in this round, if others had in an earlier one

  // Owns payloads of earlier rounds; this round's are borrowed.
  std::vector<std::shared_ptr<const void>> storage;
};

}  // namespace torch_ring
