// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <atomic>
#include <vector>

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

}  // namespace

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

}  // namespace torch_ring::test::harness_test
