// SPDX-License-Identifier: Apache-2.0
// Subscriptions: the observers of each process set, and the news for them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "control/message.h"
#include "control/news.h"

namespace torch_ring {

/// Passes news on to the observers of the process sets, and keeps them for later ones. It has a
/// lock of its own, held during the calls, so that remove() waits for them; the plane's lock is not
/// held then, so a caller of fail() or take() never waits for an observer.
///
/// Thread: any. Blocking: while an observer is called.
class Subscriptions {
 public:
  /// `labels`: by rank.
  Subscriptions(int rank, std::vector<std::string> labels);

  void add(std::uint64_t set, std::vector<int> members, ControlObserver& observer);
  void remove(std::uint64_t set);

  void tell(const Message& news);
  /// Keeps no news of a set, which has ended.
  void forget(std::uint64_t set);
  /// A rank must have left, but no news of it has arrived.
  void tell_presumed(int rank);
  void tell_connected(std::uint64_t set);

  /// "rank 3 (pid 7) died", or "rank 1 (pid 5) says that rank 3 (pid 7) died". Of this rank itself:
  /// "rank 1 (pid 5) has given up this rank, which lives; it says that rank 3 (pid 7) died".
  std::string describe(const Message& lost) const;

 private:
  struct Subscription {
    std::vector<int> members;  // ascending
    ControlObserver* observer;
  };
  void tell(std::uint64_t set, const Subscription& subscription, const Message& news) const;
  static void tell_presumed(int rank, const Subscription& subscription);

  const int rank_;
  const std::vector<std::string> labels_;

  std::mutex mutex_;  // guards the members below
  std::map<std::uint64_t, Subscription> subscriptions_;
  std::vector<Message> news_;
  std::vector<int> presumed_;
};

}  // namespace torch_ring
