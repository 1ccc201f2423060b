// SPDX-License-Identifier: Apache-2.0
#include "control/control_plane.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/syscall.h>

#include <future>
#include <numeric>
#include <set>

#include "descriptors.h"
#include "forked.h"
#include "planes.h"
#include "recording_observer.h"

namespace torch_ring::test::control_plane_test {
namespace {

constexpr std::uint64_t kWorld = 0;

std::vector<int> host_of(int size, int hosts) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank * hosts / size);
  return host_of;
}

/// Connected planes, each with a recorder that observes the world.
struct Watched {
  explicit Watched(const std::vector<int>& host_of)
      : recorders(host_of.size()), planes(make_planes(host_of)) {
    std::vector<int> ranks(host_of.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    for (std::size_t rank = 0; rank < planes.size(); ++rank) {
      planes[rank]->subscribe(kWorld, ranks, recorders[rank]);
    }
  }
  int size() const { return static_cast<int>(planes.size()); }

  void wait_for_all(const std::string& event) {
    for (std::size_t rank = 0; rank < planes.size(); ++rank) {
      if (!planes[rank]) continue;
      wait_until([&] { return recorders[rank].times(event) > 0; },
                 "rank " + std::to_string(rank) + " is told: " + event);
    }
  }
  void kill(int rank) {
    at(planes, rank)->die();
    at(planes, rank).reset();
  }

  std::vector<RecordingObserver> recorders;  // before the planes: they use them
  Planes planes;
};

/// Whether a descriptor is a TCP connection.
bool is_connection(int fd) {
  sockaddr_storage peer{};
  socklen_t bytes = sizeof peer;
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 &&
         peer.ss_family == AF_INET;
}

TEST(control_planes_connect_again_after_handshakes_that_fail) {
  for (const std::string end : {"connecting", "accepting"}) {
    const Armed armed("handshake." + end + ":*:1:close,handshake." + end + ":*:4:close");
    const Planes planes = make_planes(host_of(4, 2));
    for (const auto& plane : planes) CHECK(plane->missing().empty() && plane->lost().empty());
  }
}

TEST(control_planes_connect_and_close_all_descriptors) {
  const int before = open_descriptors();
  for (const int size : {1, 2, 3, 8, 32}) {
    for (const int hosts : {1, 2, size}) {
      if (hosts > size) continue;
      const Planes planes = make_planes(host_of(size, hosts));
      std::set<int> known;
      for (const auto& plane : planes) {
        CHECK(plane->missing().empty());
        for (const int fd : plane->descriptors()) {
          CHECK(fd >= 0 && known.insert(fd).second);
          CHECK((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
          if (is_connection(fd)) {
            int sends_at_once = 0;
            socklen_t bytes = sizeof sends_at_once;
            ::getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &sends_at_once, &bytes);
            CHECK(sends_at_once != 0);
          }
        }
        CHECK(plane->descriptors().size() <= 1 + 2 + 2 * 5 + 2);
      }
      if (size == 1) break;
    }
  }
  CHECK_EQ(open_descriptors(), before);
}

std::vector<int> tcp_connections(const ControlPlane& plane) {
  std::vector<int> fds = plane.descriptors();
  std::erase_if(fds, [](int fd) { return !is_connection(fd); });
  return fds;
}

TEST(control_plane_tells_all_of_a_death) {
  for (const int hosts : {1, 3, 20}) {
    Watched world(host_of(20, hosts));
    if (hosts == 20) {
      const linger at_once{1, 0};  // the death resets the connections
      for (const int fd : tcp_connections(*at(world.planes, 7))) {
        CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
      }
    }
    world.kill(7);
    world.wait_for_all("lost 7");
    const std::string died = "rank 7 (a thread) died: its connection closed";
    int first_hand = 0;
    for (int rank = 0; rank < world.size(); ++rank) {
      if (rank == 7) continue;
      const std::string how = at(world.recorders, rank).text("lost 7");
      if (how.starts_with(died)) {
        ++first_hand;
      } else {
        CHECK(how.find(" (a thread) says that " + died) < 9);
      }
      CHECK(hosts == 20 || how.ends_with("; see its output"));
      CHECK_EQ(at(world.recorders, rank).events().size(), 1u);
    }
    CHECK(first_hand > 0 && first_hand <= 10);
  }
}

/// The planes' threads dial and accept at any moment of a fork.
TEST(control_planes_leave_a_forked_child_no_socket) {
  if (kSanitized) return;  // a sanitizer's locks may stay held in the child
  const int before = open_descriptors("socket:");
  for (int round = 0; round < 30; ++round) {
    const Planes planes = start_planes(make_plane_options(host_of(6, 3)));
    const auto missing = [](const auto& plane) { return !plane->missing().empty(); };
    while (std::ranges::any_of(planes, missing)) {
      CHECK(holds_in_child([&] { return open_descriptors("socket:") == before; }));
    }
  }
}

TEST(control_planes_leave_the_files_of_a_forked_childs_child) {
  if (kSanitized) return;  // as above
  const Planes planes = start_planes(make_plane_options(host_of(2, 1)));
  const auto opens_files = [] {
    std::vector<Fd> files;
    for (int i = 0; i < 40; ++i) files.emplace_back(::open("/dev/null", O_RDONLY));
    return holds_in_child([&] {
      return std::ranges::all_of(files,
                                 [](const Fd& file) { return ::fcntl(file.get(), F_GETFD) >= 0; });
    });
  };
  CHECK(holds_in_child(opens_files));
}

/// Makes the calls of both ends fail with a reset connection, and drops what this end has not read.
void reset(int fd) {
  const sockaddr nowhere{};  // of AF_UNSPEC
  // Not connect(): ThreadSanitizer takes that for a new socket, which other threads use too early.
  CHECK_EQ(::syscall(SYS_connect, fd, &nowhere, sizeof nowhere), 0);
}

TEST(control_plane_makes_connections_again_that_were_reset) {
  for (const int size : {2, 3}) {
    for (int end = 0; end < size; ++end) {
      Watched world(host_of(size, size));
      for (const int fd : tcp_connections(*at(world.planes, end))) reset(fd);
      at(world.planes, end)->fail(kWorld, Error(ErrorKind::kInternal, "told afterwards"));
      for (int rank = 0; rank < size; ++rank) {
        if (rank == end) continue;
        const auto& recorder = at(world.recorders, rank);
        wait_until([&] { return !recorder.events().empty(); }, "the news arrives");
        CHECK_EQ(recorder.text(recorder.events().front()), "told afterwards");
      }
      for (const auto& plane : world.planes) CHECK(plane->lost().empty());
    }
  }
}

TEST(control_plane_asks_again_for_a_sign_of_life_that_a_reset_has_lost) {
  for (const int end : {0, 1}) {
    const Armed armed("control.receive:" + std::to_string(1 - end) + ":late=300");
    Watched world(host_of(2, 2));
    const std::uint64_t probe = at(world.planes, end)->probe(1 - end);
    const std::vector<int> fds = tcp_connections(*at(world.planes, 1 - end));
    CHECK_EQ(fds.size(), 1u);
    const auto arrived = [&] {
      char bytes[2 * Message::kHeaderBytes];
      return ::recv(fds[0], bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT) > 0;
    };
    wait_until(arrived, "the question");
    reset(fds[0]);
    wait_until([&] { return at(world.planes, end)->has_answered(probe); }, "the answer");
  }
}

TEST(control_plane_tells_a_rank_that_was_given_up_that_it_lives) {
  Watched world(host_of(3, 3));
  const auto named = [](const auto& call, int fd) {
    sockaddr_in name{};
    socklen_t bytes = sizeof name;
    CHECK_EQ(call(fd, reinterpret_cast<sockaddr*>(&name), &bytes), 0);
    return std::pair(name.sin_addr.s_addr, name.sin_port);
  };
  std::vector<int> between;
  for (const int one : tcp_connections(*world.planes[0])) {
    for (const int other : tcp_connections(*world.planes[1])) {
      const bool to = named(::getpeername, one) == named(::getsockname, other);
      if (to && named(::getsockname, one) == named(::getpeername, other)) between.push_back(one);
    }
  }
  CHECK_EQ(between.size(), 1u);
  for (const int rank : {0, 1}) {  // as behind a firewall
    for (const int fd : at(world.planes, rank)->descriptors()) {
      int listens = 0;
      socklen_t bytes = sizeof listens;
      ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes);
      if (listens != 0) ::shutdown(fd, SHUT_RDWR);
    }
  }
  reset(between.front());
  const auto own = [&](int rank) {
    return at(world.recorders, rank).text("lost " + std::to_string(rank));
  };
  wait_until([&] { return own(0) != own(1); }, "rank 2 passes on that one of them is lost");
  const int given_up = own(0) == "(never)" ? 1 : 0;
  const std::string other = std::to_string(1 - given_up);
  CHECK(own(given_up).starts_with(
      "rank " + other + " (a thread) has given up this rank, which lives; it says that "));
  CHECK(at(world.recorders, 1 - given_up)
            .text("lost " + std::to_string(given_up))
            .ends_with("see its output, or whether a firewall rejects its connections"));
}

TEST(control_plane_tells_all_of_a_departure) {
  Watched world(host_of(20, 2));
  at(world.planes, 19)->stop();
  at(world.planes, 19).reset();
  world.wait_for_all("departed 19");
  // This still holds after its former neighbours have got new ones.
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  for (int rank = 0; rank < 19; ++rank) CHECK_EQ(at(world.recorders, rank).events().size(), 1u);
}

TEST(control_plane_finds_the_survivors_beyond_dead_neighbours) {
  // Only the neighbours of rank 0 die at once, then rank 3.
  Watched world(host_of(8, 1));
  for (const int rank : {1, 2, 4, 6, 7}) at(world.planes, rank)->die();
  for (const int rank : {1, 2, 4, 6, 7}) at(world.planes, rank).reset();
  for (const int rank : {1, 2, 4, 6, 7}) world.wait_for_all("lost " + std::to_string(rank));
  world.kill(3);
  world.wait_for_all("lost 3");
  for (const int rank : {0, 5}) CHECK_EQ(at(world.recorders, rank).events().size(), 6u);
}

TEST(control_plane_takes_who_leaves_with_all_others_for_departed) {
  // No rank remains to tell rank 0 of the departures of ranks that are not its neighbours.
  Watched world(host_of(16, 1));
  std::vector<std::thread> leaving;
  for (int rank = 1; rank < 16; ++rank) {
    leaving.emplace_back([&, rank] { at(world.planes, rank).reset(); });
  }
  for (std::thread& thread : leaving) thread.join();
  for (int rank = 1; rank < 16; ++rank) world.wait_for_all("departed " + std::to_string(rank));
  CHECK_EQ(at(world.recorders, 0).events().size(), 15u);  // and no loss
}

TEST(control_plane_tells_a_set_s_failure_to_its_members) {
  std::vector<RecordingObserver> recorders(12);
  Watched world(host_of(12, 2));
  const std::vector<int> members{2, 5, 7, 11};
  for (const int rank : members) {
    if (rank != 7) at(world.planes, rank)->subscribe(3, members, at(recorders, rank));
  }
  at(world.planes, 0)->subscribe(4, {0, 5}, recorders[0]);
  at(world.planes, 5)->fail(3, Error(ErrorKind::kTimeout, "gave up"));
  const std::string event = "failed 5 " + std::to_string(static_cast<int>(ErrorKind::kTimeout));
  for (const int rank : {2, 5, 11}) {
    wait_until([&] { return at(recorders, rank).times(event) == 1; }, "a failure is known");
    CHECK_EQ(at(recorders, rank).text(event), "gave up");
  }
  // Rank 7 uses the set only now.
  wait_until(
      [&] {
        RecordingObserver late;
        at(world.planes, 7)->subscribe(3, members, late);
        at(world.planes, 7)->unsubscribe(3);
        return late.times(event) == 1;
      },
      "late news");
  // Later failures of the set are no news.
  at(world.planes, 2)->fail(3, Error(ErrorKind::kInternal, "because of rank 5"));
  world.kill(9);
  world.wait_for_all("lost 9");
  for (const int rank : {2, 5, 11}) CHECK_EQ(at(recorders, rank).events().size(), 1u);
  CHECK(recorders[0].events().empty());
}

TEST(control_plane_tells_a_failure_before_its_rank_s_departure) {
  for (int round = 0; round < 5; ++round) {
    Watched world(host_of(16, 2));
    at(world.planes, 6)->fail(kWorld, Error(ErrorKind::kInternal, "cause"));
    at(world.planes, 6).reset();
    world.wait_for_all("departed 6");
    for (int rank = 0; rank < 16; ++rank) {
      if (rank == 6) continue;
      CHECK_EQ(at(world.recorders, rank).events(),
               (std::vector<std::string>{"failed 6 4", "departed 6"}));
    }
  }
}

/// Passes points until the ranks stop; returns the number of that point. Calls `at_point(n)` before
/// point n.
template <class Do>
int pass_until_stop(ControlPlane& plane, Do&& at_point) {
  for (int point = 1;; ++point) {
    at_point(point);
    std::optional<bool> stops;
    wait_until([&] { return (stops = plane.pass_point()).has_value(); }, "the ranks agree");
    if (*stops) return point;
  }
}

TEST(control_planes_stop_at_one_point_however_many_each_rank_has_passed) {
  for (int trial = 0; trial < 10; ++trial) {
    const Planes planes = make_planes(host_of(6, 2));
    std::vector<int> stopped(planes.size());
    run_ranks(6, [&](int rank) {  // each as fast as it can
      ControlPlane& plane = *at(planes, rank);
      at(stopped, rank) = pass_until_stop(plane, [&](int point) {
        const bool got_signal = rank == trial % 6 || rank == (trial + 3) % 6;
        if (got_signal && point == 1 + 100 * (trial % 5)) plane.want_stop("SIGTERM");
      });
    });
    for (const int point : stopped) CHECK_EQ(point, stopped.front());
    for (const auto& plane : planes) {
      CHECK(plane->why_stop().ends_with("(a thread) got SIGTERM"));
      CHECK(plane->pass_point() == true);
    }
  }
}

TEST(control_plane_agrees_on_a_stop_without_ranks_that_have_left) {
  Planes planes = make_planes(host_of(3, 1));
  for (int point = 0; point < 5; ++point) CHECK(planes[1]->pass_point() == false);
  planes[1]->stop();  // it has passed more points than the others
  CHECK_EQ(planes[0]->why_stop(), "");
  planes[0]->want_stop("SIGUSR1");
  for (const int rank : {0, 2}) {
    CHECK_EQ(pass_until_stop(*at(planes, rank), [](int) {}), 1);
  }
}

TEST(control_plane_does_not_agree_on_a_stop_if_a_rank_is_lost) {
  Watched ranks(host_of(4, 2));
  CHECK(ranks.planes[0]->pass_point() == false);
  ranks.kill(3);
  for (int rank = 0; rank < 3; ++rank) {
    wait_until([&] { return at(ranks.planes, rank)->lost().size() == 1; }, "the loss is known");
  }
  CHECK(ranks.planes[0]->pass_point() == false);  // no rank wants to stop
  ranks.planes[1]->want_stop("SIGTERM");
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_THROWS(pass_until_stop(*at(ranks.planes, rank), [](int) {}), ErrorKind::kPeerLost,
                 "rank 3 (a thread) was lost while the ranks agreed where to stop");
  }
}

TEST(queries_that_nobody_can_read_are_lost_and_close_waits_for_the_reader) {
  Queries queries;
  queries.put({true, 1, 1, {}});
  std::promise<void> begun;
  std::atomic<int> read{0};
  queries.read_by([&](const Query& query) {
    if (query.number == 2) begun.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ++read;
  });
  queries.put({true, 1, 2, {}});
  begun.get_future().wait();
  queries.put({true, 1, 3, {}});
  queries.close();
  CHECK(read == 1);
  queries.put({true, 1, 4, {}});
  CHECK(read == 1);
}

TEST(control_plane_stops_while_it_connects) {
  for (int round = 0; round < 20; ++round) {
    Planes planes = start_planes(make_plane_options(host_of(12, round % 3 + 1)));
    for (auto& plane : planes) plane.reset();
  }
  auto all = make_plane_options(host_of(3, 1));
  const ControlPlane waits(std::move(all[0]));  // the others listen, but do not accept
  CHECK_EQ(waits.missing(), (std::vector<int>{1, 2}));
}

TEST(control_plane_says_who_has_exited_during_init) {
  auto all = make_plane_options(host_of(4, 2));
  all[0].unix_listener.reset();
  all[0].tcp_listeners.clear();
  all.erase(all.begin());
  const Planes planes = start_planes(std::move(all));
  for (const auto& plane : planes) {
    const Error error = setup_error(*plane);
    CHECK(error.kind() == ErrorKind::kPeerLost);
    CHECK(std::string(error.what()).starts_with("rank 0 (a thread) has exited during init"));
  }
}

TEST(control_plane_says_that_a_rank_died_during_init) {
  auto all = make_plane_options(host_of(3, 1));
  Planes planes;
  planes.push_back(std::make_unique<ControlPlane>(std::move(all[0])));
  planes.push_back(std::make_unique<ControlPlane>(std::move(all[1])));
  wait_until([&] { return planes[0]->missing() == std::vector<int>{2}; }, "rank 1 connects");
  planes[1]->die();
  CHECK_EQ(std::string(setup_error(*planes[0]).what()),
           "rank 1 (a thread) died: its connection closed; see its output");
}

TEST(control_plane_with_another_key_says_so) {
  auto all = make_plane_options(host_of(3, 3));
  all[2].key.fill(std::byte{9});
  const Planes planes = start_planes(std::move(all));
  const Error error = setup_error(*planes[2]);
  CHECK(error.kind() == ErrorKind::kMismatch);
  CHECK(std::string(error.what()).starts_with("no connection to rank "));
  wait_until([&] { return planes[0]->missing() == std::vector<int>{2}; }, "the others connect");
}

}  // namespace
}  // namespace torch_ring::test::control_plane_test
