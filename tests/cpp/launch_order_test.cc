// SPDX-License-Identifier: Apache-2.0
// LaunchOrder alone: places of several sets in one process.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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

TEST(place_that_is_taken_later_is_later_than_every_settled_one) {
  LaunchOrder order;
  Place one(order, 5, "one");
  one.settle(100);
  const Place two(order, 1, "two");
  CHECK(two.time() > 100);
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

TEST(set_is_called_by_its_ranks) {
  std::vector<std::string> labels{"rank 3 (pid 1)", "rank 5 (pid 2)"};
  CHECK_EQ(set_name(labels, "process set"), "the process set of rank 3, rank 5");
  labels.resize(10, "rank 6 (pid 3)");
  CHECK(set_name(labels, "process set").ends_with("rank 6 and 2 more"));
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

TEST(turns_of_sets_in_a_circle_come_in_one_order_on_all_ranks) {
  constexpr int kRounds = kSanitized ? 100 : 1000;
  std::vector<LaunchOrder> orders(3);
  std::vector<std::vector<std::pair<std::uint64_t, std::size_t>>> turns(3);  // by rank
  std::vector<std::unique_ptr<Exchange>> sets;
  for (int set = 0; set < 3; ++set) sets.push_back(std::make_unique<Exchange>(2));
  run_ranks(6, [&](int thread) {  // set s has the ranks s and s + 1
    const auto set = static_cast<std::size_t>(thread / 2);
    const std::size_t rank = (set + static_cast<std::size_t>(thread % 2)) % 3;
    std::mt19937 random(static_cast<unsigned>(thread));
    for (int round = 0; round < kRounds; ++round) {
      Place place(orders[rank], set, "set");
      place.settle(sets[set]->latest(place.time()));
      place.wait(kNone, seconds(20));
      turns[rank].emplace_back(place.time(), set);  // the turn is the lock
      if (random() % 4 == 0) std::this_thread::yield();
    }
  });
  for (const auto& of_rank : turns) {
    CHECK_EQ(of_rank.size(), std::size_t{2 * kRounds});
    CHECK(std::ranges::is_sorted(of_rank));
  }
}

}  // namespace
}  // namespace torch_ring::test::launch_order_test
