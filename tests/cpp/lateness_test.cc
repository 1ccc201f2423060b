// Lateness: the line of a minute, and who says it.
#include "engine/lateness.h"

#include <array>

#include "harness.h"

namespace torch_ring::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// What rank `self` of four says after two minutes of a wait a second, each for a rank of `last`.
std::vector<std::string> lines(int self, const std::vector<int>& last, milliseconds lag) {
  Lateness lateness(self, 4);
  std::vector<std::string> lines;
  for (int second = 0; second <= 120; ++second) {
    const int late = last[static_cast<std::size_t>(second) % last.size()];
    const auto text = lateness.note(late, lag, Clock::time_point{} + seconds(second));
    if (text) lines.push_back(text->text);
  }
  return lines;
}

TEST(lateness_one_rank_says_once_a_minute_who_is_late) {
  const auto said = lines(0, {3, 3, 3, 2}, milliseconds(38));
  CHECK_EQ(said.size(), 2u);
  CHECK_EQ(said[0],
           "rank 3 was last in 75 % of the 60 agreements for which rank 0 waited 10 ms or more in "
           "the last minute, by 38 ms in the median (docs/tracing.md)");
  CHECK(lines(1, {3, 3, 3, 2}, milliseconds(38)).empty());
  CHECK(lines(2, {3, 3, 3, 2}, milliseconds(38)).empty());
}

TEST(lateness_rank_1_speaks_of_rank_0) {
  CHECK(lines(0, {0}, milliseconds(38)).empty());
  CHECK_EQ(lines(1, {0}, milliseconds(38)).size(), 2u);
}

TEST(lateness_is_silent_without_a_majority_or_a_notable_wait) {
  CHECK(lines(0, {1, 2, 3}, milliseconds(38)).empty());
  CHECK(lines(0, {1, 2}, milliseconds(38)).empty());
  CHECK(lines(0, {3}, milliseconds(9)).empty());
  CHECK(lines(0, {-1}, milliseconds(38)).empty());  // nobody knows for whom it waited
}

TEST(lateness_the_rank_that_speaks_looks_at_the_late_one_but_not_without_end) {
  Lateness speaks(0, 4);
  Lateness listens(2, 4);
  const auto note = [&](int second) {
    for (Lateness* const lateness : {&speaks, &listens}) {
      lateness->note(3, milliseconds(38), Clock::time_point{} + seconds(second));
    }
  };
  note(0);
  note(1);
  CHECK(!speaks.suspect());
  note(2);
  CHECK(speaks.suspect() == 3);
  CHECK(!listens.suspect());
  for (int i = 0; i < Lateness::kLooks; ++i) speaks.looked();
  CHECK(!speaks.suspect());
  note(70);  // a new period
  CHECK(speaks.suspect() == 3);
  speaks.note(1, milliseconds(38), Clock::time_point{} + seconds(140));  // and one more
  CHECK(speaks.suspect() == 3);
  CHECK(speaks.look_after() < milliseconds(38));
}

TEST(lateness_looks_at_the_rank_that_costs_most_whatever_short_waits_there_are) {
  Lateness lateness(0, 4);
  for (int second = 0; second < 3; ++second) {
    const auto now = Clock::time_point{} + seconds(second);
    for (const int other : {1, 2, 1, 2}) lateness.note(other, milliseconds(12), now);
    lateness.note(3, milliseconds(200), now);
  }
  CHECK(lateness.suspect() == 3);
}

/// In which tenths of its long waits rank 0 looks, of a thousand waits of these lengths in turn.
std::array<int, 10> tenths(const std::vector<milliseconds>& lengths) {
  Lateness lateness(0, 4);
  std::array<int, 10> looks{};
  for (int i = 0; i < 1000; ++i) {
    const milliseconds length = lengths[static_cast<std::size_t>(i) % lengths.size()];
    while (i >= 3 && lateness.look_after() < length) {
      CHECK(lateness.look_after() >= Lateness::kNotable);
      if (length > milliseconds(100))
        ++looks.at(static_cast<std::size_t>(10 * lateness.look_after() / length));
      lateness.looked();
    }
    lateness.note(3, length, Clock::time_point{} + milliseconds(i));
  }
  return looks;
}

TEST(lateness_looks_are_spread_over_waits_of_one_length) {
  for (const int in_tenth : tenths({milliseconds(1000)})) CHECK(in_tenth >= 50 && in_tenth <= 70);
}

TEST(lateness_looks_are_spread_over_the_longer_ones_of_several_waits) {
  for (const int in_tenth : tenths({milliseconds(20), milliseconds(1000)}))
    CHECK(in_tenth >= 50 && in_tenth <= 70);
}

}  // namespace
}  // namespace torch_ring::test
