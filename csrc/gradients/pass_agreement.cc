// SPDX-License-Identifier: Apache-2.0
#include "gradients/pass_agreement.h"

#include <numeric>
#include <utility>

#include "engine/request.h"

namespace torch_ring {

PassReports PassAgreement::gather(Engine& engine, const PassReport& report,
                                  const Engine::Interrupt& interrupt) {
  if (reducing_) {
    engine.end(Error(ErrorKind::kInternal,
                     "a backward pass was interrupted while its gradients were being reduced"));
  }
  if (!open_) {
    const auto reports = std::make_shared<Reports>(Reports{report.encode(), {}});
    Request request;
    request.fingerprint.collective = Collective::kAllgather;
    request.fingerprint.dtype = DType::kUInt8;
    request.fingerprint.name = backward_name(number_);
    request.fingerprint.joinable = true;
    request.rows = {static_cast<std::int64_t>(reports->mine.size())};
    request.input = reports->mine.data();
    request.allocate = [reports](std::span<const std::int64_t> rows) {
      reports->all.resize(
          static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0})));
      return static_cast<void*>(reports->all.data());
    };
    open_ = engine.submit(std::move(request), Engine::Mode::kBlocking);
    reports_ = reports;
  }
  // Copies, because the interrupt runs Python, which may end this agreement.
  const auto open = open_;
  const auto reports = reports_;
  try {
    engine.wait(*open, interrupt);
  } catch (const Error&) {
    open_.reset();
    reports_.reset();
    throw;
  }
  return PassReport::decode_all(reports->all);
}

std::shared_ptr<const PassReport> PassAgreement::open_report() const {
  return open_ ? PassReport::decode_all(reports_->mine).front() : nullptr;
}

void PassAgreement::restart(std::uint64_t number) {
  number_ = number;
  open_.reset();
  reports_.reset();
  reducing_ = false;
  arriving_ = sent_in_vain_ = false;
  const std::scoped_lock lock(mutex_);
  failure_.clear();
}

void PassAgreement::give_up(const std::string& why, bool sent) {
  const bool is_missed = arriving_.exchange(false, std::memory_order_relaxed) && !why.empty();
  if (!is_missed && !sent) return;
  const std::scoped_lock lock(mutex_);
  if (sent) sent_in_vain_ = true;
  if (!failure_.empty()) return;
  failure_ =
      is_missed
          ? "backward pass " + std::to_string(number_ + 1) + " has failed (" + why +
                "), and the program has caught that and gone on, while the other ranks are in that "
                "pass. A batch can be left out or repeated by all ranks together: call backward() "
                "in `with optimizer.no_sync():`, then zero_grad() if any_rank(failed), else step()"
          : kSentInVain;
}

std::string PassAgreement::failure() const {
  const std::scoped_lock lock(mutex_);
  return failure_;
}

}  // namespace torch_ring
