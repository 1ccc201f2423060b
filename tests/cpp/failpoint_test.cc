// SPDX-License-Identifier: Apache-2.0
#include "core/failpoint.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "armed.h"
#include "core/clock.h"
#include "core/error.h"
#include "harness.h"

namespace torch_ring::test::failpoint_test {
namespace {

TEST(failpoint_does_nothing_unless_armed) {
  CHECK(!failpoint("departure", 0));
  {
    const Armed armed("departure:close");
    CHECK(failpoint("departure", 0));
    CHECK(!failpoint("departed", 0));
  }
  CHECK(!failpoint("departure", 0));
}

TEST(failpoint_is_of_a_rank_and_a_time) {
  const Armed armed("departure:1:close,departed:2:3:close,collective:*:2:close");
  CHECK(!failpoint("departure", 0) && failpoint("departure", 1) && failpoint("departure", 1));
  CHECK(!failpoint("departed", 2) && !failpoint("departed", 2) && failpoint("departed", 2));
  CHECK(!failpoint("departed", 2));
  CHECK(!failpoint("collective", 5) && failpoint("collective", 7));
}

TEST(failpoint_makes_late_and_sleeps) {
  const Armed armed("data.receive:late=60,departure:sleep=40");
  CHECK(failpoint("data.receive", 0));
  const auto begin = Clock::now();
  CHECK(!failpoint("departure", 0));
  CHECK(Clock::now() - begin >= std::chrono::milliseconds(40));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!failpoint("data.receive", 0));
}

TEST(failpoint_kills_and_stops_the_process) {
  for (const auto& [action, signal] : {std::pair("kill", SIGKILL), std::pair("stop", SIGSTOP)}) {
    const pid_t child = ::fork();
    if (child == 0) {
      arm_failpoints(std::string("collective:2:2:") + action);
      failpoint("collective", 2);
      failpoint("collective", 2);
      ::_exit(0);
    }
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, WUNTRACED), child);
    if (signal == SIGSTOP) {
      CHECK(WIFSTOPPED(status));
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    } else {
      CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
  }
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
}  // namespace torch_ring::test::failpoint_test
