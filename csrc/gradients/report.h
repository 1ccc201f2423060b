// SPDX-License-Identifier: Apache-2.0
// PassReport: a rank's message to the others at the end of a backward pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/finite.h"
#include "gradients/bitmap.h"

namespace torch_ring {

/// A gradient of one rank with a number that is not finite, or too large to be sent.
struct NotFinite {
  std::size_t parameter;
  int rank;  // in the world
  Worst worst;
  bool carries;  // it has an averaged part, which may be the cause

  bool operator==(const NotFinite&) const = default;
};

/// The gradients of one optimizer on one rank.
struct GradientReport {
  std::size_t optimizer;              // its index, the same on all ranks
  Bitmap due = {};                    // to reduce now
  Bitmap sparse = {};                 // those of `due` that are sparse here
  bool accumulating = false;          // there are others, to be reduced later in this step
  bool incomplete = false;            // there are parameters that are not due, and were not reduced
                                      // since the step began: the program may set their gradients
  bool stepping = false;              // the optimizer is about to step: all its gradients are due
  bool late = false;                  // some came after their buckets had been sent: another round
  Bitmap carried = {};                // those, due or not, with an averaged part: it is not sent
  Bitmap unsure = {};                 // those of `carried` that may not be those of other ranks
  std::vector<std::uint32_t> order;   // in which they became ready; empty if the ranks know it
  std::string digest = {};            // 8 bytes, of the weights; empty if they have been compared
  std::vector<NotFinite> not_finite;  // among `due`, if the ranks check them

  bool operator==(const GradientReport&) const = default;
};

/// One rank's message to the others at the end of a backward pass, or before a step.
struct PassReport {
  std::uint64_t steps = 0;                // of all its optimizers
  std::vector<GradientReport> gradients;  // of the optimizers that have some
  bool gave_up = false;    // the pass before has failed here, and the program has gone on
  std::uint32_t plan = 0;  // the digest of the plan, if the pass is planned

  /// Whether the rank is about to step, and not at the end of a pass.
  bool is_of_step() const;

  /// The parameters to reduce now, by optimizer; optimizers without any are left out.
  std::map<std::size_t, Bitmap> due() const;

  bool operator==(const PassReport&) const = default;

  /// Little-endian, without padding.
  std::string encode() const;

  /// Encoded reports that follow one another; equal ones are one object. Errors: Error(kInternal)
  /// for other bytes.
  static std::vector<std::shared_ptr<const PassReport>> decode_all(std::string_view encoded);
};

/// The reports of the ranks that have not joined, in the order of ranks.
using PassReports = std::vector<std::shared_ptr<const PassReport>>;

}  // namespace torch_ring
