// SPDX-License-Identifier: Apache-2.0
// decide(): how the ranks go on with the gradients that they have reported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "gradients/report.h"

namespace torch_ring {

/// The common end of a backward pass, or beginning of a step. Optimizers and parameters are named
/// by their indices.
struct PassDecision {
  /// The gradients of one optimizer that all ranks reduce now.
  struct Reduction {
    std::size_t optimizer;
    Bitmap touched;                     // a rank has them; the others send zeros
    Bitmap sparse;                      // those of `touched` that no rank has as a dense one
    Bitmap carried;                     // those of `touched` that a rank has added to an averaged
                                        // gradient, which stays; of others an averaged one is gone
    Bitmap unlike;                      // those of `carried` of which not all ranks have the same
                                        // averaged one: it is averaged once more
    std::vector<std::uint32_t> order;   // rank 0's; empty if it is known, or a rank has joined
    std::vector<NotFinite> not_finite;  // those of `touched`, of all ranks
  };

  bool given_up = false;                   // by some ranks, not by all: the job must end
  std::optional<std::size_t> out_of_step;  // the first report of another step than the first one

  std::vector<Reduction> reductions;  // in the order of optimizers
  bool is_of_step = false;            // all ranks are about to step
  bool is_whole = false;              // no rank has joined
  bool has_digests = false;           // of weights, which the ranks compare
  bool has_another_round = false;     // the ranks report once more, as soon as these are reduced

  // Optimizers.
  std::set<std::size_t> mentioned;   // that a rank uses: the decision is about them
  std::set<std::size_t> open;        // with gradients that a later round or pass reduces
  std::set<std::size_t> incomplete;  // with parameters that have no averaged gradient yet
};

/// Decides by the reports alone, so that all ranks decide alike.
///
/// All ranks reduce a gradient that is due on any, as a dense one if any rank has a dense one. But
/// while some ranks end a pass and others are about to step, the gradients of the latter wait until
/// all step: the programs of the former may set the same ones by hand. In a planned pass, which has
/// sent them already, they count.
///
/// `reports`: of the ranks that have not joined. `size`: of all ranks. `parameters`: their numbers,
/// by optimizer. Thread: any. Blocking: no. Errors: Error(kInternal) without any report.
PassDecision decide(const PassReports& reports, std::size_t size,
                    const std::map<std::size_t, std::size_t>& parameters);

}  // namespace torch_ring
