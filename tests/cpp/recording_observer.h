// SPDX-License-Identifier: Apache-2.0
// RecordingObserver: an observer that records its calls.
#pragma once

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "control/news.h"

namespace torch_ring::test {

/// Of planes that are made after it, so that they end first.
class RecordingObserver : public ControlObserver {
 public:
  void on_lost(int rank, const std::string& how) override {
    add("lost " + std::to_string(rank), how);
  }
  /// "departed 3" after all, "departed 3 after 7" rounds of a set; the text is the reason.
  void on_departed(int rank, std::optional<std::uint64_t> rounds, const std::string& why) override {
    std::string event = "departed " + std::to_string(rank);
    if (rounds.value_or(0) != 0) event += " after " + std::to_string(*rounds);
    add(event, rounds ? why : "presumed");
  }
  void on_failed(int rank, ErrorKind kind, const std::string& why) override {
    add("failed " + std::to_string(rank) + " " + std::to_string(static_cast<int>(kind)), why);
  }
  void on_connected() override { add("connected", ""); }

  /// The number of such events.
  int times(const std::string& event) const {
    const std::scoped_lock lock(mutex_);
    return static_cast<int>(std::ranges::count(events_, event));
  }
  std::vector<std::string> events() const {
    const std::scoped_lock lock(mutex_);
    return events_;
  }
  /// The text of the first such event.
  std::string text(const std::string& event) const {
    const std::scoped_lock lock(mutex_);
    const auto found = std::ranges::find(events_, event);
    if (found == events_.end()) return "(never)";
    return texts_[static_cast<std::size_t>(found - events_.begin())];
  }

 private:
  void add(const std::string& event, const std::string& text) {
    const std::scoped_lock lock(mutex_);
    events_.push_back(event);
    texts_.push_back(text);
  }

  mutable std::mutex mutex_;
  std::vector<std::string> events_;
  std::vector<std::string> texts_;
};

}  // namespace torch_ring::test
