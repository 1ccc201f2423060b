// SPDX-License-Identifier: Apache-2.0
#include "gradients/decide.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace torch_ring {

namespace {

/// The reports without repetition of the one before.
std::vector<const PassReport*> distinct(const PassReports& reports) {
  std::vector<const PassReport*> found;
  for (const auto& report : reports) {
    if (found.empty() || found.back() != report.get()) found.push_back(report.get());
  }
  return found;
}

/// Some reports' gradients of one optimizer.
struct Reported {
  Bitmap touched;
  std::vector<const GradientReport*> reports;
};

}  // namespace

PassDecision decide(const PassReports& reports, std::size_t size,
                    const std::map<std::size_t, std::size_t>& parameters) {
  if (reports.empty()) throw Error(ErrorKind::kInternal, "no rank has reported its gradients");
  const std::vector<const PassReport*> ranks = distinct(reports);
  const PassReport& first = *ranks.front();
  PassDecision decision;
  decision.is_whole = reports.size() == size;
  decision.is_of_step = std::ranges::all_of(ranks, &PassReport::is_of_step);
  decision.given_up = !std::ranges::all_of(ranks, &PassReport::gave_up) &&
                      std::ranges::any_of(ranks, &PassReport::gave_up);
  const auto other = std::ranges::find_if(
      reports, [&](const auto& report) { return report->steps != first.steps; });
  if (other != reports.end()) {
    decision.out_of_step = static_cast<std::size_t>(other - reports.begin());
  }

  std::map<std::size_t, Reported> reported;
  for (const PassReport* rank : ranks) {
    const bool counts = decision.is_of_step || !rank->is_of_step() || rank->plan != 0;
    for (const GradientReport& report : rank->gradients) {
      Reported& of_optimizer = reported[report.optimizer];
      of_optimizer.reports.push_back(&report);
      if (counts) of_optimizer.touched |= report.due;
    }
  }
  for (auto& [optimizer, of_optimizer] : reported) {
    const auto& [touched, mine] = of_optimizer;
    Bitmap dense;    // on some rank
    Bitmap carried;  // on some rank
    Bitmap on_all = mine.size() == ranks.size() ? touched : Bitmap();
    Bitmap unsure;
    PassDecision::Reduction reduction{optimizer, touched, {}, {}, {}, {}, {}};
    bool is_incomplete = false;
    for (const GradientReport* report : mine) {
      const bool waits = (report->due - touched).any();
      dense |= report->due - report->sparse;
      carried |= report->due & report->carried;
      on_all = on_all & report->carried;
      unsure |= report->unsure;
      for (const NotFinite& each : report->not_finite) {
        if (touched.get(each.parameter)) reduction.not_finite.push_back(each);
      }
      if (report->late) decision.has_another_round = true;
      if (!report->digest.empty()) decision.has_digests = true;
      if (report->accumulating || report->late || waits) decision.open.insert(optimizer);
      if (report->due.any() || report->accumulating || report->stepping) {
        decision.mentioned.insert(optimizer);
      }
      is_incomplete = is_incomplete || report->incomplete;
    }
    const auto count = parameters.find(optimizer);
    const bool is_covered = count != parameters.end() && touched.count() == count->second;
    if (is_incomplete && !is_covered) decision.incomplete.insert(optimizer);
    if (!touched.any()) continue;
    reduction.sparse = touched - dense;
    reduction.carried = carried & touched;
    reduction.unlike = reduction.carried - (on_all - unsure);
    // A joined rank is not told the order, and all must keep the same plan.
    for (const GradientReport& report : first.gradients) {
      if (decision.is_whole && report.optimizer == optimizer) reduction.order = report.order;
    }
    decision.reductions.push_back(std::move(reduction));
  }
  return decision;
}

}  // namespace torch_ring
