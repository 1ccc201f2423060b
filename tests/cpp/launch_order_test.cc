// SPDX-License-Identifier: Apache-2.0
// LaunchOrder alone: places of several sets in one process.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "engine/device.h"
#include "harness.h"

namespace torch_ring::test::launch_order_test {
namespace {

using Place = LaunchOrder::Place;
using std::chrono::milliseconds;
using std::chrono::seconds;

const Abort kNone;

TEST(place_behind_an_earlier_one_waits_until_that_is_free) {
  LaunchOrder order;
  std::optional<Place> first(std::in_place, order, 1, "the first set");
  Place second(order, 2, "the second set");
  second.settle(second.time());
  CHECK_THROWS(second.wait(kNone, milliseconds(1)), ErrorKind::kTimeout,
               "its turn on the device has not come within 0.001 s: the first set is before it");
  first.reset();
  second.wait(kNone, seconds(20));
}

TEST(unsettled_place_lets_an_earlier_settled_one_pass_and_no_later_one) {
  LaunchOrder order;
  Place one(order, 1, "one");
  std::optional<Place> two(std::in_place, order, 2, "two");
  one.settle(two->time() + 5);
  CHECK_THROWS(one.wait(kNone, milliseconds(1)), ErrorKind::kTimeout, "two is before it");
  two->settle(two->time() + 6);  // behind
  one.wait(kNone, seconds(20));
}

TEST(equal_times_are_ordered_by_the_numbers_of_the_sets) {
  LaunchOrder order;
  Place nine(order, 9, "nine");
  Place three(order, 3, "three");
  nine.settle(7);
  three.settle(7);
  three.wait(kNone, seconds(20));
  CHECK_THROWS(nine.wait(kNone, milliseconds(1)), ErrorKind::kTimeout, "three is before it");
}

TEST(aborted_set_waits_for_its_turn_no_more) {
  LaunchOrder order;
  const Place first(order, 1, "first");
  Place second(order, 2, "second");
  Abort abort;
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(20));
    abort.raise(Error(ErrorKind::kPeerLost, "rank 1 is gone"));
  });
  CHECK_THROWS(second.wait(abort, seconds(20)), ErrorKind::kPeerLost, "rank 1 is gone");
  other.join();
}

/// The exchange of one set, whose members are threads.
class Exchange {
 public:
  explicit Exchange(int members) : members_(members) {}

  std::uint64_t latest(std::uint64_t time) {
    std::unique_lock lock(mutex_);
    latest_ = std::max(latest_, time);
    const int round = round_;
    if (++arrived_ == members_) {
      result_ = std::exchange(latest_, 0);
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
    return result_;
  }

 private:
  const int members_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t latest_ = 0;
  std::uint64_t result_ = 0;
  int arrived_ = 0;
  int round_ = 0;
};

}  // namespace
}  // namespace torch_ring::test::launch_order_test
