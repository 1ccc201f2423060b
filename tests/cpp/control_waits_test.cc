// SPDX-License-Identifier: Apache-2.0
// Waits: the wait-for graph from the ranks' announcements.
#include "control/news.h"
#include "harness.h"
#include "transport/wait_graph.h"

namespace torch_ring::test::control_waits_test {
namespace {

using Ranks = std::vector<int>;

Message tell(int rank, std::uint64_t number, const Ranks& ranks, std::uint64_t set = 0) {
  return Message::waits(rank, set, {number, ranks});
}

Ranks ends(const Waits& waits, const Ranks& ranks, std::uint64_t set = 0) {
  return waits.ends(set, ranks);
}

/// Records a rank's announcements.
class KeptGraph final : public WaitGraph {
 public:
  std::chrono::milliseconds patience() const override { return {}; }
  void tell(std::span<const int> ranks) override { told.emplace_back(ranks.begin(), ranks.end()); }
  void ask(std::span<const int>) override {}
  bool is_notified() const override { return false; }
  Ranks ends(std::span<const int> ranks) const override { return {ranks.begin(), ranks.end()}; }
  std::optional<int> departed(std::span<const int>) const override { return std::nullopt; }
  std::chrono::milliseconds patience_with_departed() const override { return {}; }
  const std::string& label(int) const override { return label_; }

  std::vector<Ranks> told;

 private:
  std::string label_;
};

/// Waits for rank 2 until the wait ends, by an exception or without one.
std::vector<Ranks> told_of_a_wait(bool throws) {
  KeptGraph graph;
  try {
    LongWait wait(&graph);
    wait.lasts(Clock::now(), [] { return Ranks{2}; });
    if (throws) throw Error(ErrorKind::kTimeout, "no progress");
  } catch (const Error&) {
  }
  return graph.told;
}

TEST(the_end_of_a_wait_is_told_but_not_that_by_an_error) {
  CHECK_EQ(told_of_a_wait(false).size(), 2u);
  CHECK(told_of_a_wait(false).back().empty());
  CHECK(told_of_a_wait(true) == std::vector<Ranks>(1, Ranks{2}));
}

TEST(a_wait_tells_again_when_it_is_for_others) {
  KeptGraph graph;
  LongWait wait(&graph);
  for (const Ranks& ranks : {Ranks{2, 3}, Ranks{3}, Ranks{3}, Ranks{1}, Ranks{1}, Ranks{1, 3}}) {
    wait.lasts(Clock::now(), [&] { return ranks; });
  }
  CHECK(graph.told == (std::vector<Ranks>{{2, 3}, {1}, {1, 3}}));
}

TEST(waits_lead_to_the_ranks_that_wait_for_nobody) {
  Waits waits;
  CHECK(!waits.any(0));
  CHECK_EQ(ends(waits, {1, 2}), (Ranks{1, 2}));
  CHECK(waits.learn(tell(1, 1, {2})));
  CHECK(waits.learn(tell(2, 1, {3, 4})));
  CHECK(waits.any(0));
  CHECK_EQ(ends(waits, {1}), (Ranks{3, 4}));
  CHECK(waits.learn(tell(3, 1, {1, 4})));  // a circle with an end
  CHECK_EQ(ends(waits, {1}), Ranks{4});
  CHECK_EQ(ends(waits, {5, 1}), (Ranks{4, 5}));
}

TEST(waits_in_a_circle_have_no_end) {
  Waits waits;
  waits.learn(tell(0, 1, {1}));
  waits.learn(tell(1, 1, {2}));
  waits.learn(tell(2, 1, {0}));
  CHECK_EQ(ends(waits, {1}), Ranks{1});
}

TEST(waits_of_sets_are_apart) {
  Waits waits;
  waits.learn(tell(1, 1, {2}, 7));
  CHECK(!waits.any(0));
  CHECK(!waits.any(8));
  CHECK(waits.any(7));
  CHECK_EQ(ends(waits, {1}), Ranks{1});
  CHECK_EQ(ends(waits, {1}, 7), Ranks{2});
}

TEST(a_wait_that_has_ended_stays_so) {
  Waits waits;
  CHECK(waits.learn(tell(1, 1, {2})));
  CHECK(!waits.learn(tell(1, 1, {2})));  // on another path
  CHECK_EQ(waits.known().size(), 1u);
  CHECK(waits.learn(tell(1, 2, {})));
  CHECK(!waits.learn(tell(1, 1, {2})));
  CHECK(!waits.any(0));
  CHECK_EQ(ends(waits, {1}), Ranks{1});
  CHECK(waits.known() == std::vector{tell(1, 2, {})});  // for ranks that know the wait
}

TEST(waits_of_one_rank_in_two_sets_may_be_heard_in_any_order) {
  Waits waits;
  CHECK(waits.learn(tell(1, 5, {2}, 7)));
  CHECK(waits.learn(tell(1, 4, {3}, 8)));
  CHECK(waits.any(7) && waits.any(8));
}

TEST(a_new_neighbour_is_told_of_all_waits) {
  News news(3);
  CHECK(news.learn(Message::departed(2)));
  CHECK(news.learn(tell(0, 1, {1})));
  CHECK(news.learn(tell(1, 1, {0})));
  CHECK(news.learn(tell(1, 2, {})));
  CHECK(news.known() == (std::vector{Message::departed(2), tell(0, 1, {1}), tell(1, 2, {})}));
}

}  // namespace
}  // namespace torch_ring::test::control_waits_test
