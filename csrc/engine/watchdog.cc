#include "engine/watchdog.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/at.h"
#include "engine/request.h"

namespace torch_ring {

namespace {

// A departed rank's last posts may still be on their way to this one; after this they are not.
constexpr std::chrono::milliseconds kDepartureGrace{250};

}  // namespace

Watchdog::Watchdog(ControlPlane* plane, std::uint64_t set, std::vector<int> members,
                   std::vector<std::string> labels, Abort& abort, std::function<void()> raised)
    : plane_(plane),
      set_(set),
      members_(std::move(members)),
      labels_(std::move(labels)),
      abort_(abort),
      raised_(std::move(raised)) {
  // The last statement: the plane may call this object from here on.
  if (plane_ != nullptr) plane_->subscribe(set_, members_, *this);
}

void Watchdog::stop() {
  if (plane_ != nullptr) plane_->unsubscribe(set_);
  plane_ = nullptr;
}

void Watchdog::announce(const Error& cause) {
  if (plane_ != nullptr) plane_->fail(set_, cause);
}

void Watchdog::check_departures() const {
  const auto first = departure();
  if (first && Clock::now() - first->since > kDepartureGrace) throw departed(first->rank);
}

Error Watchdog::root_cause(const Error& error) const {
  if (error.kind() != ErrorKind::kPeerLost) return error;
  auto first = departure();
  const auto since = Clock::now();
  // Peers may still be finishing a collective in which the departed rank took part, which raising
  // the abort at once would spoil.
  while (!abort_.raised() && Clock::now() - (first ? first->since : since) < kDepartureGrace) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!first) first = departure();
  }
  return first ? departed(first->rank) : error;
}

void Watchdog::on_lost(int, const std::string& how) {
  if (abort_.raise(Error(ErrorKind::kPeerLost, how))) raised_();
}

void Watchdog::on_departed(int rank) {
  {
    const std::scoped_lock lock(mutex_);
    if (!departure_) departure_ = Departure{rank, Clock::now()};
  }
  raised_();
}

void Watchdog::on_failed(int rank, ErrorKind kind, const std::string& why) {
  const ErrorKind here = kind == ErrorKind::kTimeout ? kind : ErrorKind::kPeerLost;
  if (abort_.raise(Error(here, label(rank) + " failed: " + why))) raised_();
}

void Watchdog::on_connected() { raised_(); }

std::optional<Watchdog::Departure> Watchdog::departure() const {
  const std::scoped_lock lock(mutex_);
  return departure_;
}

Error Watchdog::departed(int rank) const {
  return {ErrorKind::kPeerLost,
          label(rank) + " has left: it called shutdown() or exited. " + kAllRanksMustCall};
}

const std::string& Watchdog::label(int rank) const {
  const auto member = std::find(members_.begin(), members_.end(), rank);
  return at(labels_, member - members_.begin());
}

}  // namespace torch_ring
