// SPDX-License-Identifier: Apache-2.0
#include "engine/device.h"

#include <algorithm>
#include <chrono>

#include "engine/agreement.h"

namespace torch_ring {

namespace {

// How often a wait for a turn checks the abort, which does not wake it.
constexpr std::chrono::milliseconds kPollInterval{50};

constexpr std::size_t kMostNames = 8;

}  // namespace

LaunchOrder::Place::Place(LaunchOrder& order, std::uint64_t set, std::string name) : order_(order) {
  const std::scoped_lock lock(order_.mutex_);
  key_ = {++order_.clock_, set};
  order_.places_.emplace(key_, std::move(name));
}

LaunchOrder::Place::~Place() {
  const std::scoped_lock lock(order_.mutex_);
  order_.places_.erase(key_);
  order_.changed_.notify_all();
}

void LaunchOrder::Place::settle(Communicator& host) {
  const auto size = static_cast<std::size_t>(host.size());
  const std::uint64_t mine = time();
  std::vector<std::uint64_t> times(size, mine);
  host.allgather(&mine, times.data(), std::vector<std::size_t>(size, sizeof mine));
  settle(*std::ranges::max_element(times));
}

void LaunchOrder::Place::settle(std::uint64_t time) {
  const std::scoped_lock lock(order_.mutex_);
  order_.clock_ = std::max(order_.clock_, time);
  auto place = order_.places_.extract(key_);
  place.key().first = key_.first = time;
  order_.places_.insert(std::move(place));
  order_.changed_.notify_all();
}

void LaunchOrder::Place::wait(const Abort& abort, Clock::duration timeout) const {
  std::unique_lock lock(order_.mutex_);
  auto front = order_.places_.begin()->first;
  auto deadline = Clock::now() + timeout;
  while (front != key_) {
    order_.changed_.wait_for(lock, kPollInterval);
    abort.check();
    const auto& [first, name] = *order_.places_.begin();
    if (std::exchange(front, first) != first) {
      deadline = Clock::now() + timeout;
    } else if (Clock::now() > deadline) {
      throw Error(ErrorKind::kTimeout,
                  "its turn on the device has not come within " +
                      in_seconds(std::chrono::floor<std::chrono::milliseconds>(timeout)) + ": " +
                      name + " is before it, and makes no progress");
    }
  }
  abort.check();
}

std::string set_name(std::span<const std::string> labels, const std::string& members) {
  std::string text = "the " + members + " of ";
  for (std::size_t i = 0; i < std::min(labels.size(), kMostNames); ++i) {
    text += (i == 0 ? "" : ", ") + name_in(labels[i]);
  }
  if (labels.size() > kMostNames) {
    text += " and " + std::to_string(labels.size() - kMostNames) + " more";
  }
  return text;
}

namespace {

constexpr std::chrono::milliseconds kPoll{50};  // between checks of an abort

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
      changed_.wait_until(lock, std::min(deadline, Clock::now() + kPoll));
    }
  }
  return take();
}

Clock::duration DeviceGate::held_for() {
  const std::scoped_lock lock(mutex_);
  return taken_ ? Clock::now() - since_ : Clock::duration{0};
}

/// Precondition: the mutex is locked.
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
