// SPDX-License-Identifier: Apache-2.0
#include "engine/watchdog.h"

#include <atomic>
#include <thread>

#include "harness.h"
#include "planes.h"

namespace torch_ring::test::watchdog_test {
namespace {

constexpr std::uint64_t kSet = 5;
const std::string kLeft =
    " has left: it called shutdown() or exited. All ranks must call the same collectives, in the "
    "same order";

/// The watchdog of one rank, and its effects.
struct Watched {
  Watched(ControlPlane* plane, std::uint64_t set, std::vector<int> members)
      : watchdog(plane, set, members, labels_of(members), "shutdown()", abort,
                 [this] { ++raised; }) {}

  /// In the order of the set, not of the world.
  static std::vector<std::string> labels_of(const std::vector<int>& members) {
    std::vector<std::string> labels;
    for (const int rank : members) labels.push_back("member " + std::to_string(rank));
    return labels;
  }
  void wait_for_abort() {
    wait_until([&] { return abort.raised() && raised > 0; }, "the abort is raised");
  }

  Abort abort;
  std::atomic<int> raised{0};
  Watchdog watchdog;  // last: it uses the others
};

/// Ends a rank's plane like a dying process, or, below, like a leaving one.
void kill(Planes& planes, int rank) {
  at(planes, rank)->die();
  at(planes, rank).reset();
}
void leave(Planes& planes, int rank, const std::string& why = {}) {
  at(planes, rank)->stop(kGoodbyePatience, why);
  at(planes, rank).reset();
}

TEST(watchdog_raises_when_a_member_dies) {
  Planes planes = make_planes({0, 0, 0, 0});
  Watched set(planes[0].get(), kSet, {3, 0});
  Watched others(planes[0].get(), kSet + 1, {0, 1});
  kill(planes, 3);
  set.wait_for_abort();
  CHECK_THROWS(set.abort.check(), ErrorKind::kPeerLost,
               "rank 3 (a thread) died: its connection closed; see its output");
  CHECK_EQ(set.raised, 1);
  // The plane has told all observers, or is about to; the other set hears only of its own member.
  kill(planes, 1);
  others.wait_for_abort();
  CHECK_THROWS(others.abort.check(), ErrorKind::kPeerLost, "rank 1 (a thread) died");
  CHECK_EQ(others.raised, 1);
}

TEST(watchdog_keeps_the_kind_of_a_timeout_and_no_other) {
  const std::pair<ErrorKind, ErrorKind> kinds[] = {
      {ErrorKind::kTimeout, ErrorKind::kTimeout},
      {ErrorKind::kInternal, ErrorKind::kPeerLost},
      {ErrorKind::kPeerLost, ErrorKind::kPeerLost},
      {ErrorKind::kMismatch, ErrorKind::kPeerLost},
  };
  Planes planes = make_planes({0, 1, 1});
  std::uint64_t number = kSet;
  for (const auto& [announced, heard] : kinds) {
    Watched here(planes[0].get(), number, {2, 0});
    Watched there(planes[2].get(), number, {2, 0});
    there.watchdog.announce(Error(announced, "no memory left"));
    here.wait_for_abort();
    CHECK_THROWS(here.abort.check(), heard, "member 2 failed: no memory left");
    ++number;
  }
}

TEST(watchdog_hears_what_happened_before_it_began) {
  Planes planes = make_planes({0, 0, 0, 0});
  Watched world(planes[0].get(), 0, {0, 1, 2, 3});
  Watched there(planes[1].get(), kSet, {0, 1});
  Watched witness(planes[0].get(), kSet, {0, 1});
  there.watchdog.announce(Error(ErrorKind::kTimeout, "gave up early"));
  witness.wait_for_abort();
  witness.watchdog.stop();
  const Watched failed(planes[0].get(), kSet, {0, 1});
  CHECK_THROWS(failed.abort.check(), ErrorKind::kTimeout, "member 1 failed: gave up early");

  kill(planes, 2);
  world.wait_for_abort();
  const Watched dead(planes[0].get(), kSet + 1, {0, 2});
  CHECK_THROWS(dead.abort.check(), ErrorKind::kPeerLost, "rank 2 (a thread) died");
  CHECK_EQ(dead.raised, 1);

  const int told = world.raised;
  leave(planes, 3, "disk full");
  wait_until([&] { return world.raised > told; }, "the departure is known");
  const Watched departed(planes[0].get(), kSet + 2, {0, 3});
  CHECK_EQ(departed.raised, 1);
  CHECK(!departed.abort.raised());
  const Error lost(ErrorKind::kPeerLost, "connection closed");
  const auto cause = departed.watchdog.root_cause(lost, 1);
  CHECK_EQ(std::string(cause.error.what()), "member 3 left: disk full");
  CHECK(cause.is_departure);
}

/// Whether a departure is an error for a wait in `round`.
bool is_missed(const Watchdog& watchdog, std::uint64_t round) {
  try {
    watchdog.check_departures(round);
  } catch (const Error&) {
    return true;
  }
  return false;
}

TEST(watchdog_makes_a_departure_an_error_from_the_first_round_without_it_on) {
  Planes planes = make_planes({0, 1});
  Watched set(planes[0].get(), kSet, {0, 1});
  Watched unused(planes[0].get(), kSet + 1, {0, 1});
  CHECK(!is_missed(set.watchdog, 8));
  Watched there(planes[1].get(), kSet, {0, 1});
  there.watchdog.leave(7);
  wait_until([&] { return is_missed(set.watchdog, 8); }, "the departure is known");
  CHECK(!is_missed(set.watchdog, 7));  // its missing data is on the way
  CHECK_THROWS(set.watchdog.check_departures(8), ErrorKind::kPeerLost, "member 1" + kLeft);
  CHECK(!set.abort.raised());             // ranks that do not wait for it go on
  CHECK(!is_missed(unused.watchdog, 1));  // it has left only one set
  there.watchdog.stop();
  leave(planes, 1);
  wait_until([&] { return is_missed(unused.watchdog, 1); }, "it has left them all");
  CHECK(!is_missed(set.watchdog, 7));
}

TEST(watchdog_ends_a_wait_for_the_data_of_a_rank_that_leaves) {
  for (const bool before : {true, false}) {
    Planes planes = make_planes({0, 0});
    Watched set(planes[0].get(), kSet, {0, 1});
    Watched there(planes[1].get(), kSet, {0, 1});
    set.watchdog.begin_data(3);
    set.watchdog.end_data();
    if (!before) set.watchdog.begin_data(4);
    there.watchdog.leave(3);
    if (before) {
      wait_until([&] { return set.raised > 0; }, "the departure is known");
      CHECK_THROWS(set.watchdog.begin_data(4), ErrorKind::kPeerLost, "member 1" + kLeft);
    } else {
      set.wait_for_abort();
      CHECK_THROWS(set.abort.check(), ErrorKind::kPeerLost, "member 1" + kLeft);
    }
  }
}

TEST(watchdog_says_which_loss_a_rank_knew_when_it_left_without_a_reason) {
  Planes planes = make_planes({0, 0, 0, 0});
  Watched used(planes[0].get(), kSet, {0, 1});
  Watched unused(planes[0].get(), kSet + 1, {0, 1});
  Watched there(planes[1].get(), kSet, {0, 1});
  kill(planes, 3);
  wait_until([&] { return !planes[1]->lost().empty(); }, "the loss is known");
  there.watchdog.leave(0);
  there.watchdog.stop();
  leave(planes, 1);
  for (const Watched* const set : {&used, &unused}) {
    wait_until([&] { return is_missed(set->watchdog, 1); }, "the departure is known");
    CHECK_THROWS(set->watchdog.check_departures(1), ErrorKind::kPeerLost,
                 "member 1 left: it knows that rank 3 (a thread) died: its connection");
  }
}

TEST(watchdog_names_the_departed_rank_as_the_cause_of_a_lost_connection) {
  Planes planes = make_planes({0, 1, 0});
  Watched set(planes[0].get(), kSet, {2, 1, 0});
  const Error lost(ErrorKind::kPeerLost, "connection closed");
  std::thread leaving([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    leave(planes, 1);
  });
  // The connection is lost before the goodbye arrives.
  const auto cause = set.watchdog.root_cause(lost, 5);
  leaving.join();
  CHECK_EQ(std::string(cause.error.what()), "member 1" + kLeft);
  CHECK(cause.is_departure);
  // A rank that leaves later is not the cause.
  const int told = set.raised;
  leave(planes, 2);
  wait_until([&] { return set.raised > told; }, "the second departure is known");
  CHECK_EQ(std::string(set.watchdog.root_cause(lost, 5).error.what()), "member 1" + kLeft);
}

TEST(watchdog_hears_nothing_after_stop) {
  Planes planes = make_planes({0, 0});
  Watched set(planes[0].get(), kSet, {0, 1});
  Watched later(planes[0].get(), kSet + 1, {0, 1});
  set.watchdog.stop();
  set.watchdog.stop();
  set.watchdog.announce(Error(ErrorKind::kInternal, "nobody is told"));
  kill(planes, 1);
  later.wait_for_abort();
  CHECK_EQ(set.raised, 0);
  CHECK(!set.abort.raised());
}

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
}  // namespace torch_ring::test::watchdog_test
