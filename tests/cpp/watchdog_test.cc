#include "engine/watchdog.h"

#include <atomic>
#include <memory>
#include <thread>

#include "core/at.h"
#include "test_world.h"

namespace torch_ring::test {
namespace {

TEST(watchdog_raises_when_heartbeats_stop) {
  // A peer with an open but silent socket, as after SIGSTOP or on a cut link.
  auto [ours, theirs] = unix_pair();
  std::vector<Fd> control(2);
  control[1] = std::move(ours);
  Abort abort;
  std::atomic<bool> raised{false};
  Watchdog watchdog(0, std::move(control), {"rank 0", "rank 1 (pid 7)"},
                    std::chrono::milliseconds(200), abort, [&] { raised = true; });
  while (!raised) std::this_thread::yield();
  CHECK_THROWS(
      abort.check(), ErrorKind::kPeerLost,
      "rank 1 (pid 7) has not been heard for 0.2 s (TORCH_RING_HEARTBEAT_TIMEOUT): it is stopped, "
      "or its host is cut off");
}

TEST(watchdog_raises_when_the_control_connection_closes) {
  auto [ours, theirs] = unix_pair();
  std::vector<Fd> control(2);
  control[1] = std::move(ours);
  Abort abort;
  std::atomic<bool> raised{false};
  Watchdog watchdog(0, std::move(control), {"rank 0", "rank 1 (pid 7)"}, std::chrono::minutes(1),
                    abort, [&] { raised = true; });
  theirs.reset();
  while (!raised) std::this_thread::yield();
  CHECK_THROWS(abort.check(), ErrorKind::kPeerLost,
               "rank 1 (pid 7) died: its connection closed; see its output");
}

TEST(watchdog_passes_the_cause_on_before_it_leaves) {
  // Rank 1 sees rank 2 alive. Rank 0 sends it the cause about rank 2, and then its goodbye.
  auto [zero_to_one, one_to_zero] = unix_pair();
  auto [zero_to_two, two_to_zero] = unix_pair();
  const std::vector<std::string> labels{"rank 0 (pid 5)", "rank 1 (pid 6)", "rank 2 (pid 7)"};
  const auto watch = [&](int rank, int peer, Fd socket, int other, Fd other_socket, Abort& abort,
                         std::atomic<bool>& raised) {
    std::vector<Fd> control(3);
    at(control, peer) = std::move(socket);
    if (other_socket) at(control, other) = std::move(other_socket);
    return std::make_unique<Watchdog>(rank, std::move(control), labels, std::chrono::minutes(1),
                                      abort, [&] { raised = true; });
  };
  Abort aborts[2];
  std::atomic<bool> raised[2]{};
  const auto one = watch(1, 0, std::move(one_to_zero), 2, {}, aborts[1], raised[1]);
  auto zero = watch(0, 1, std::move(zero_to_one), 2, std::move(zero_to_two), aborts[0], raised[0]);
  two_to_zero.reset();
  while (!raised[0]) std::this_thread::yield();
  zero.reset();
  while (!raised[1]) std::this_thread::yield();
  CHECK_THROWS(aborts[1].check(), ErrorKind::kPeerLost,
               "rank 0 (pid 5) says that rank 2 (pid 7) died: its connection closed");
}

TEST(a_departed_rank_is_the_cause_of_lost_connections_and_an_error_after_a_grace) {
  auto [ours, theirs] = unix_pair();
  std::vector<Fd> control(2);
  std::vector<Fd> peers_control(2);
  control[1] = std::move(ours);
  peers_control[0] = std::move(theirs);
  const std::vector<std::string> labels{"rank 0", "rank 1 (pid 7)"};
  Abort aborts[2];
  std::atomic<bool> noticed{false};
  const Watchdog watchdog(0, std::move(control), labels, std::chrono::minutes(1), aborts[0],
                          [&] { noticed = true; });
  Watchdog(1, std::move(peers_control), labels, std::chrono::minutes(1), aborts[1], [] {}).stop();
  while (!noticed) std::this_thread::yield();

  const Error lost(ErrorKind::kPeerLost, "connection closed");
  CHECK_EQ(std::string(watchdog.root_cause(lost).what()),
           "rank 1 (pid 7) has left: it called shutdown() or exited. All ranks must call the same "
           "collectives, in the same order");
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // of the grace nothing is left now
  CHECK_THROWS(watchdog.check_departures(), ErrorKind::kPeerLost, "rank 1 (pid 7) has left");
  const Error silent(ErrorKind::kTimeout, "nothing came");
  CHECK_EQ(std::string(watchdog.root_cause(silent).what()), "nothing came");
  CHECK(!aborts[0].raised());
}

}  // namespace
}  // namespace torch_ring::test
