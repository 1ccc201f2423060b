// SPDX-License-Identifier: Apache-2.0
// Lateness: the line of a minute, and the rank that logs it.
#include "engine/watchdog.h"
#include "harness.h"

namespace torch_ring::test::lateness_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// The lines of rank `self` of four after two minutes of a wait a second, each for a rank of
/// `last`.
std::vector<std::string> lines(int self, const std::vector<int>& last, milliseconds lag) {
  Lateness lateness(self, 4);
  std::vector<std::string> lines;
  for (int second = 0; second <= 120; ++second) {
    const int late = last[static_cast<std::size_t>(second) % last.size()];
    const auto text = lateness.note(late, lag, Clock::time_point{} + seconds(second));
    if (text) lines.push_back(*text);
  }
  return lines;
}

TEST(lateness_rank_0_says_once_a_minute_which_rank_is_late) {
  const auto said = lines(0, {3, 3, 3, 2}, milliseconds(38));
  CHECK_EQ(said.size(), 2u);
  CHECK_EQ(said[0],
           "rank 3 was last in 75 % of the 60 agreements for which a rank waited 10 ms or more in "
           "the last minute, by 38 ms in the median (docs/tracing.md)");
  CHECK_EQ(lines(0, {0}, milliseconds(38)).size(), 2u);  // also about itself
  for (const int other : {1, 2, 3}) CHECK(lines(other, {3, 3, 3, 2}, milliseconds(38)).empty());
}

TEST(lateness_is_silent_without_a_majority_or_a_notable_wait) {
  CHECK(lines(0, {1, 2, 3}, milliseconds(38)).empty());
  CHECK(lines(0, {1, 2}, milliseconds(38)).empty());
  CHECK(lines(0, {0, 1}, milliseconds(38)).empty());
  CHECK(lines(0, {3}, milliseconds(9)).empty());
  CHECK(lines(0, {-1}, milliseconds(38)).empty());  // the last rank is unknown
}

TEST(lateness_names_no_rank_that_posted_last_with_other_operations) {
  CHECK_EQ(last_of({1, 2}, 3), -1);
  CHECK_EQ(last_of({1, 2}, 2), 2);
  CHECK_EQ(last_of({1}, 3), 1);
  CHECK_EQ(last_of({}, 3), 3);
}

}  // namespace
}  // namespace torch_ring::test::lateness_test
