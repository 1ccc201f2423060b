// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <atomic>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/failpoint.h"

namespace torch_ring::test::harness_test {
namespace {

std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const CheckFailed& failed) {
    return failed.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(harness_failed_check_shows_the_values) {
  CHECK(has(message_of([] { CHECK(1 > 2); }), "not true: 1 > 2"));
  CHECK(has(message_of([] { CHECK_EQ(1 + 1, 3); }), "1 + 1 == 3: 2 is not 3"));
  const std::vector<int> two{1, 2};
  CHECK(has(message_of([&] { CHECK_EQ(two, std::vector<int>{}); }), "[1, 2] is not []"));
  CHECK(has(message_of([] { CHECK_THROWS(1, ErrorKind::kTimeout, ""); }), "nothing was thrown"));
}

TEST(harness_run_ranks_runs_all_ranks_and_names_the_failed) {
  std::atomic<int> sum{0};
  run_ranks(4, [&](int rank) { sum += rank; });
  CHECK_EQ(sum.load(), 6);
  const std::string errors = message_of([] { run_ranks(3, [](int rank) { CHECK(rank != 1); }); });
  CHECK(has(errors, "rank 1: "));
  CHECK(!has(errors, "rank 0: "));
}

TEST(failpoint_is_of_a_rank_and_a_time) {
  const Armed armed("departure:1:close,departed:2:3:close,collective:*:2:close");
  CHECK(!failpoint("departure", 0) && failpoint("departure", 1) && failpoint("departure", 1));
  CHECK(!failpoint("departed", 2) && !failpoint("departed", 2) && failpoint("departed", 2));
  CHECK(!failpoint("departed", 2));
  CHECK(!failpoint("collective", 5) && failpoint("collective", 7));
}

TEST(failpoint_refuses_what_it_does_not_know) {
  const auto refused = [](const char* spec, const char* why) {
    CHECK_THROWS(arm_failpoints(spec), ErrorKind::kInvalidArgument, why);
  };
  refused("nowhere:kill", "TORCH_RING_FAIL: 'nowhere:kill': there is no such place");
  refused("departure", "place[:rank][:nth]:action");
  refused("departure:1:2:3:kill", "place[:rank][:nth]:action");
  refused("departure:one:kill", "'one' is no number");
  refused("departure:1:-2:kill", "'-2' is no number");
  refused("departure:explode", "the action is kill, stop");
  refused("departure:sleep", "need milliseconds");
  refused("departure:kill=9", "milliseconds");
  refused("departure:kill,", "no such place");
  CHECK(!Failpoints::armed());
}

}  // namespace
}  // namespace torch_ring::test::harness_test
