// SPDX-License-Identifier: Apache-2.0
#include "control/rank_claim.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <string>

#include "harness.h"

namespace torch_ring::test::rank_claim_test {

namespace {

using namespace std::string_literals;
using std::chrono::milliseconds;

/// A Unix socket bound to an abstract name, or, if `connect`, connected to it.
Fd socket_at(const std::string& name, bool connect = false, const std::string& own = "") {
  Fd made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto call = [&](auto function, const std::string& where) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::ranges::copy(where, address.sun_path);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + where.size());
    CHECK_EQ(function(made.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  };
  if (!own.empty()) call(::bind, own);
  call(connect ? ::connect : ::bind, name);
  if (!connect) CHECK_EQ(::listen(made.get(), 4), 0);
  return made;
}

std::int64_t since_boot_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

struct Answer {
  char text;
  bool ends_the_world;
};

/// The answer to a process that was started `after` the beginning of the world.
Answer ask(milliseconds after, milliseconds overlap) {
  const std::string name = "\0torch_ring/test/"s + std::to_string(::getpid());
  RankClaim claim(socket_at(name), overlap);
  const std::string started = std::to_string(since_boot_ms() + after.count());
  const Fd asking = socket_at(name, true, "\0torch_ring/ask/"s + started + "/x");
  PollSet polls;
  claim.add_to(polls);
  polls.wait(Clock::now() + std::chrono::seconds(10));
  const auto same = claim.check(polls);
  Answer answer{'?', same.has_value()};
  CHECK_EQ(::recv(asking.get(), &answer.text, 1, 0), 1);
  if (same) CHECK_EQ(*same, ::getpid());
  return answer;
}

}  // namespace

TEST(a_rank_that_was_on_its_way_is_refused_and_ends_a_young_world) {
  const Answer answer = ask(milliseconds(-1000), std::chrono::minutes(1));
  CHECK_EQ(answer.text, 's');
  CHECK(answer.ends_the_world);
}

TEST(a_rank_that_was_on_its_way_is_refused_by_an_old_world_which_goes_on) {
  const Answer answer = ask(milliseconds(-1000), milliseconds(0));
  CHECK_EQ(answer.text, 's');
  CHECK(!answer.ends_the_world);
}

TEST(a_rank_that_was_started_later_is_anothers) {
  const Answer answer = ask(milliseconds(1000), std::chrono::minutes(1));
  CHECK_EQ(answer.text, 'o');
  CHECK(!answer.ends_the_world);
}

}  // namespace torch_ring::test::rank_claim_test
