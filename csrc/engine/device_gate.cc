#include "engine/device_gate.h"

#include <algorithm>

namespace torch_ring {

namespace {

constexpr std::chrono::milliseconds kLook{50};  // between looks at an abort

}  // namespace

DeviceGate::Pass DeviceGate::try_enter() {
  const std::scoped_lock lock(mutex_);
  return take();
}

DeviceGate::Pass DeviceGate::enter(Clock::duration patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return !taken_; });
  return take();
}

DeviceGate::Pass DeviceGate::enter(Clock::duration patience, const Abort& abort) {
  std::unique_lock lock(mutex_);
  if (taken_) {
    const auto deadline = Clock::now() + patience;
    while (taken_ && !abort.raised() && Clock::now() < deadline) {
      changed_.wait_until(lock, std::min(deadline, Clock::now() + kLook));
    }
  }
  return take();
}

Clock::duration DeviceGate::held_for() {
  const std::scoped_lock lock(mutex_);
  return taken_ ? Clock::now() - since_ : Clock::duration{0};
}

/// Needs the mutex.
DeviceGate::Pass DeviceGate::take() {
  if (taken_) return nullptr;
  taken_ = true;
  since_ = Clock::now();
  return Pass(this);
}

void DeviceGate::leave() {
  const std::scoped_lock lock(mutex_);
  taken_ = false;
  changed_.notify_one();
}

}  // namespace torch_ring
