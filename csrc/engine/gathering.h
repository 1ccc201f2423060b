// Gathering: the decision of a request that all ranks announce in one round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/decision.h"
#include "engine/entry.h"

namespace torch_ring {

/// Fills in a decision: what follows from the announcements of all ranks, without their names.
///
/// Thread: one. Blocking: no.
class Gathering {
 public:
  Gathering(const Round& round, Collective collective, Decision& decision)
      : round_(round), collective_(collective), decision_(decision) {}

  /// Takes the announcement of all ranks of a run.
  void add(const Run& run, const Announcement& announcement);

  /// `shared_before`: the number of buffers in shared memory that the entry announces before.
  void finish(std::size_t shared_before);

 private:
  const Round& round_;
  const Collective collective_;
  Decision& decision_;
  bool all_shared_ = true;
  bool all_inline_ = true;
};

/// Adds the rows that an announcement has.
void append_rows(std::vector<std::int64_t>& rows, ByteSpan bytes);

}  // namespace torch_ring
