// SPDX-License-Identifier: Apache-2.0
// Departures: the goodbye of a leaving rank is heard, and its last data arrives, however late.
#include <sys/resource.h>

#include <atomic>
#include <thread>

#include "control/message.h"
#include "engine_ranks.h"
#include "forked.h"
#include "recording_observer.h"

namespace torch_ring::test::departure_test {
namespace {

/// All ranks in one process need many descriptors.
void raise_descriptor_limit() {
  rlimit limit{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(departing_rank_waits_until_a_slow_peer_has_heard_all) {
  const Armed armed("control.receive:0:late=400");
  RecordingObserver recorder;
  Planes planes = make_planes({0, 1});
  planes[0]->subscribe(0, {0, 1}, recorder);
  // More than the buffers of a connection hold.
  const Error cause(ErrorKind::kInternal, std::string(Message::kTextBytes, 'x'));
  for (std::uint64_t set = 1; set < 3000; ++set) planes[1]->fail(set, cause);
  planes[1]->stop();
  wait_until([&] { return !recorder.events().empty(); }, "rank 1 is gone");
  CHECK_EQ(recorder.events(), std::vector<std::string>{"departed 1"});
}

TEST(departing_rank_that_says_no_goodbye_is_lost) {
  const Armed armed("departure:1:close");
  RecordingObserver recorder;
  Planes planes = make_planes({0, 1});
  planes[0]->subscribe(0, {0, 1}, recorder);
  CHECK(planes[0]->lost().empty());
  planes[1]->stop();
  wait_until([&] { return recorder.times("lost 1") > 0; }, "rank 1 is lost");
  CHECK_EQ(planes[0]->lost(), std::vector<int>{1});
}

TEST(departed_rank_s_last_data_may_be_late) {
  for (const std::size_t count : {10u, 300'000u}) {
    const Armed armed("data.receive:2:late=700");
    run_engines({0, 1, 2}, [&](Rank& rank) {
      std::vector<float> values = rank.input(count);
      rank.wait(rank.allreduce(values, "last"));
      CHECK(values == Rank::sums(count, rank.size()));
    });
  }
}

TEST(departed_rank_s_last_data_may_be_late_between_hosts) {
  const Armed armed("data.receive:1:late=700");  // of the second host's leader
  run_engines({0, 0, 1, 1}, [&](Rank& rank) {
    std::vector<float> values = rank.input(10);
    rank.wait(rank.allreduce(values, "last"));
    CHECK(values == Rank::sums(10, rank.size()));
  });
}

// As if a host were cut off after its rank's goodbye: neither a death nor a missing heartbeat is
// noticed.
const std::string kNeverComes = "data.receive:1:late=60000";
constexpr std::chrono::seconds kSilence{1};
const std::string kNotCome =
    "rank 1 (a thread) has left, and its last data has not arrived for 1 s";

TEST(departed_rank_s_last_data_may_never_come) {
  const Armed armed("");
  run_engines(
      {0, 1},
      [&](Rank& rank) {
        // Rank 1 waits for no data, and its rows fit the buffers of a socket.
        std::vector<float> values(10'000), received;
        Request request;
        request.fingerprint.collective = Collective::kAlltoall;
        request.rows = {rank.rank() == 1 ? 10'000 : 0, 0};
        request.input = values.data();
        request.allocate = [&](std::span<const std::int64_t>) -> void* {
          if (rank.rank() == 0) arm_failpoints(kNeverComes);
          received.resize(10'000);
          return received.data();
        };
        const auto exchange = [&] { rank.engine().submit_and_wait(request, {}); };
        if (rank.rank() == 1) {
          exchange();
        } else {
          CHECK_THROWS(exchange(), ErrorKind::kPeerLost, kNotCome);
        }
      },
      patient(), kSilence);
}

TEST(departure_is_an_error_of_those_who_miss_the_rank_and_of_no_others) {
  for (const Hosts& layout : {Hosts{"", {0, 0, 0}}, Hosts{"", {0, 1, 2}}}) {
    std::atomic<bool> missed{false};
    run_engines(layout.host_of, [&](Rank& rank) {
      std::vector<float> values = rank.input(10);
      rank.wait(rank.allreduce(values, "together"));
      if (rank.rank() == 0) return;
      if (rank.rank() == 1) {
        CHECK_THROWS(rank.wait(rank.allreduce(values, "more")), ErrorKind::kPeerLost,
                     "rank 0 (a thread) has left");
        missed = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      } else {
        wait_until([&] { return missed.load(); }, "rank 1 has missed rank 0");
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        rank.engine().check();  // it waits for no rank
        CHECK_THROWS(rank.wait(rank.allreduce(values, "more")), ErrorKind::kPeerLost,
                     "rank 0 (a thread) has left");
      }
    });
  }
}

/// Many ranks over TCP do `barrier(); shutdown()`, and each observes all others meanwhile.
bool leave_in_peace_after_a_barrier(int size) {
  raise_descriptor_limit();
  const std::vector<int> host_of = one_rank_a_host(size);
  std::vector<RecordingObserver> recorders(host_of.size());
  std::vector<World> worlds = make_worlds(host_of, Sockets::kTcp);
  Planes planes = make_planes(host_of);
  constexpr std::uint64_t kObserved = 1;  // the engines have set 0
  for (std::size_t rank = 0; rank < planes.size(); ++rank) {
    planes[rank]->subscribe(kObserved, host_of, recorders[rank]);
  }
  run_ranks(size, [&](int rank) {
    Rank self(at(worlds, rank), std::move(at(planes, rank)), patient());
    Request barrier;
    barrier.fingerprint.collective = Collective::kBarrier;
    self.engine().submit_and_wait(barrier, {});
  });
  for (const RecordingObserver& recorder : recorders) {
    for (const std::string& event : recorder.events()) CHECK(event.starts_with("departed "));
  }
  return true;
}

TEST(departures_of_64_ranks_over_tcp_disturb_no_barrier) {
  CHECK(holds_in_child([] { return leave_in_peace_after_a_barrier(kSanitized ? 8 : 64); }));
}

}  // namespace
}  // namespace torch_ring::test::departure_test
