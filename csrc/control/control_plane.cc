#include "control/control_plane.h"

#include <algorithm>
#include <utility>

#include "control/loop.h"
#include "core/at.h"

namespace torch_ring {

namespace {

class PlaneSockets : public SocketSource {
 public:
  PlaneSockets(ControlLoop& loop, std::uint64_t set, std::vector<int> members, int width)
      : loop_(loop), set_(set), members_(std::move(members)), width_(width) {}

  std::vector<Fd> take(int peer, bool needed) override {
    return loop_.take(set_, at(members_, peer), width_, needed);
  }

 private:
  ControlLoop& loop_;
  const std::uint64_t set_;
  const std::vector<int> members_;
  const int width_;
};

class PlaneWaits : public WaitGraph {
 public:
  PlaneWaits(ControlLoop& loop, std::uint64_t set, std::vector<int> members,
             std::chrono::milliseconds patience)
      : loop_(loop), set_(set), members_(std::move(members)), patience_(patience) {}

  std::chrono::milliseconds patience() const override { return patience_; }
  void tell(std::span<const int> ranks) override { loop_.tell_wait(set_, in_world(ranks)); }
  void ask(std::span<const int> ranks) override {
    for (const int rank : in_world(ranks)) loop_.ask(rank);
  }
  bool is_told() const override { return loop_.somebody_waits(set_); }
  const std::string& label(int rank) const override { return loop_.label(at(members_, rank)); }
  std::optional<int> departed(std::span<const int> ranks) const override {
    const std::optional<std::size_t> place = loop_.first_departed(in_world(ranks));
    return place ? std::optional(ranks[*place]) : std::nullopt;
  }
  std::chrono::milliseconds patience_with_departed() const override {
    return loop_.heartbeat_timeout();
  }

  std::vector<int> ends(std::span<const int> ranks) const override {
    std::vector<int> ends;
    for (const int rank : loop_.ends_of_waits(set_, in_world(ranks))) {
      const auto member = std::ranges::find(members_, rank);
      if (member != members_.end()) ends.push_back(static_cast<int>(member - members_.begin()));
    }
    return ends;
  }

 private:
  std::vector<int> in_world(std::span<const int> ranks) const {
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(at(members_, rank));
    return members;
  }

  ControlLoop& loop_;
  const std::uint64_t set_;
  const std::vector<int> members_;
  const std::chrono::milliseconds patience_;
};

}  // namespace

ControlPlane::ControlPlane(Options options)
    : loop_(std::make_unique<ControlLoop>(std::move(options))) {}

ControlPlane::~ControlPlane() { stop(); }

std::vector<int> ControlPlane::missing() const { return loop_->missing(); }

std::string ControlPlane::trouble() const { return loop_->trouble(); }

void ControlPlane::give_reason(std::string why) { loop_->give_reason(std::move(why)); }

void ControlPlane::leave(std::uint64_t set, std::uint64_t rounds, int members) {
  loop_->leave(set, rounds, members);
}

bool ControlPlane::has_ended(std::uint64_t set) const { return loop_->has_ended(set); }

std::vector<int> ControlPlane::lost() const { return loop_->lost(); }

std::uint64_t ControlPlane::connections() const { return loop_->connections(); }

void ControlPlane::stop(std::chrono::milliseconds patience) {
  loop_->stop(ControlLoop::Farewell::kGoodbye, patience);
}

void ControlPlane::die() { loop_->stop(ControlLoop::Farewell::kNone); }

void ControlPlane::subscribe(std::uint64_t set, std::vector<int> members,
                             ControlObserver& observer) {
  loop_->subscriptions().add(set, std::move(members), observer);
}

void ControlPlane::unsubscribe(std::uint64_t set) {
  loop_->subscriptions().remove(set);
  loop_->close(set);
}

void ControlPlane::fail(std::uint64_t set, const Error& cause) { loop_->fail(set, cause); }

std::unique_ptr<SocketSource> ControlPlane::sockets(std::uint64_t set, std::vector<int> members,
                                                    int width) {
  return std::make_unique<PlaneSockets>(*loop_, set, std::move(members), width);
}

std::unique_ptr<WaitGraph> ControlPlane::waits(std::uint64_t set, std::vector<int> members,
                                               std::chrono::milliseconds patience) {
  return std::make_unique<PlaneWaits>(*loop_, set, std::move(members), patience);
}

std::uint64_t ControlPlane::ask(int rank) { return loop_->ask(rank); }

std::uint64_t ControlPlane::probe(int rank) { return loop_->probe(rank); }

bool ControlPlane::has_answered(std::uint64_t probe) const { return loop_->has_answered(probe); }

void ControlPlane::answer(int rank, std::uint64_t number, std::string text) {
  loop_->answer(rank, number, std::move(text));
}

void ControlPlane::read_letters(Letters::Reader reader) {
  loop_->letters().read_by(std::move(reader));
}

std::vector<int> ControlPlane::descriptors() const { return loop_->descriptors(); }

}  // namespace torch_ring
