// SPDX-License-Identifier: Apache-2.0
// A simulation: ranks as pairs of News and Graph, connections as queues, in random order.
#include <deque>
#include <map>
#include <random>

#include "control/graph.h"
#include "control/news.h"
#include "core/at.h"
#include "harness.h"

namespace torch_ring::test::control_news_test {
namespace {

class Simulation {
 public:
  Simulation(int size, unsigned seed)
      : graph_(std::vector<int>(static_cast<std::size_t>(size), 0)), random_(seed) {
    const std::vector<bool> all(static_cast<std::size_t>(size), true);
    for (int rank = 0; rank < size; ++rank) ranks_.push_back({News(size), all, {}});
    for (int rank = 0; rank < size; ++rank) {
      for (const int peer : graph_.neighbours(rank, all)) connect(rank, peer);
    }
  }

  void say(int rank, const Message& message) { learn(rank, message, -1); }

  /// The rank is gone, with the messages that it has not received. Its sent messages arrive.
  void kill(int rank) {
    at(ranks_, rank).alive = false;
    for (auto& [pair, queue] : queues_) {
      if (pair.second == rank) queue.clear();
      if (pair.first == rank && at(ranks_, pair.second).alive) queue.push_back(end());
    }
  }

  /// Delivers until no message is on its way; in order on each connection.
  void run(int at_most = 1 << 30) {
    while (at_most-- > 0) {
      std::vector<std::pair<int, int>> ready;
      for (auto& [pair, queue] : queues_) {
        if (!queue.empty()) ready.push_back(pair);
      }
      if (ready.empty()) return;
      deliver(ready[random_() % ready.size()]);
    }
  }

  const std::vector<Message>& heard(int rank) const { return at(ranks_, rank).heard; }
  const News& news(int rank) const { return at(ranks_, rank).news; }
  bool alive(int rank) const { return at(ranks_, rank).alive; }
  long messages() const { return messages_; }
  std::mt19937& random() { return random_; }

 private:
  struct Rank {
    News news;
    std::vector<bool> present;
    std::vector<Message> heard;
    bool alive = true;
  };
  static Message end() { return Message::heartbeat(0); }  // represents the end of a stream

  void connect(int from, int to) {
    auto [queue, added] = queues_.try_emplace({from, to});
    if (!added) return;
    for (const Message& message : at(ranks_, from).news.known()) {
      queue->second.push_back(message);
      ++messages_;
    }
    connect(to, from);
  }

  void deliver(std::pair<int, int> pair) {
    auto& queue = queues_.at(pair);
    const Message message = queue.front();
    queue.pop_front();
    const auto [from, to] = pair;
    if (!at(ranks_, to).alive) return;
    if (message == end()) {
      learn(to, Message::lost(from, to, "died"), -1);
    } else {
      learn(to, message, from);
    }
  }

  void learn(int rank, const Message& message, int from) {
    Rank& it = at(ranks_, rank);
    if (!it.news.learn(message)) return;
    it.heard.push_back(message);
    for (auto queue = queues_.lower_bound({rank, 0});
         queue != queues_.end() && queue->first.first == rank; ++queue) {
      const int peer = queue->first.second;
      if (peer == from || !at(ranks_, peer).alive) continue;
      queue->second.push_back(message);
      ++messages_;
    }
    if (message.kind != Message::Kind::kLost) return;
    it.present[static_cast<std::size_t>(message.rank)] = false;
    repair(rank);
  }

  /// Connects to the next ranks; dead ones are lost.
  void repair(int rank) {
    Rank& it = at(ranks_, rank);
    for (const int peer : graph_.neighbours(rank, it.present)) {
      if (queues_.contains({rank, peer})) continue;
      if (at(ranks_, peer).alive) {
        connect(rank, peer);
      } else {
        learn(rank, Message::lost(peer, rank, "died"), -1);
      }
    }
  }

  const Graph graph_;
  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, std::deque<Message>> queues_;  // (from, to)
  long messages_ = 0;
};

int count(const std::vector<Message>& heard, Message::Kind kind, int rank, std::uint64_t set = 0) {
  int found = 0;
  for (const Message& message : heard) {
    found += message.kind == kind && message.rank == rank && message.set == set;
  }
  return found;
}

TEST(nothing_is_kept_of_a_set_that_all_its_members_have_left) {
  const Error cause(ErrorKind::kTimeout, "too slow");
  for (unsigned seed = 0; seed < 30; ++seed) {
    const int size = 3 + static_cast<int>(seed);
    Simulation simulation(size, seed);
    for (std::uint64_t set = 100; set < 110; ++set) {  // each of ranks 0 and 1
      simulation.say(0, Message::waits(0, set, {set, {1}}));
      simulation.say(1, Message::failed(1, set, cause));
      simulation.say(0, Message::left(0, set, 3, 2, ""));
      simulation.run(static_cast<int>(seed) * 3);
      CHECK(!simulation.news(0).has_ended(set));
      simulation.say(1, Message::left(1, set, 4, 2, ""));
    }
    simulation.say(0, Message::left(0, 99, 3, 2, ""));  // a set that rank 1 is still in
    simulation.run();
    for (int rank = 0; rank < size; ++rank) {
      for (std::uint64_t set = 100; set < 110; ++set) {
        CHECK(simulation.news(rank).has_ended(set));
        CHECK(!simulation.news(rank).has_failed(set));
        CHECK_EQ(count(simulation.heard(rank), Message::Kind::kLeft, 0, set), 1);
        CHECK_EQ(count(simulation.heard(rank), Message::Kind::kLeft, 1, set), 1);
      }
      CHECK(!simulation.news(rank).has_ended(99));
      CHECK_EQ(simulation.news(rank).known().size(), 1u);
    }
  }
}

TEST(news_of_a_set_that_has_ended_are_none) {
  News news(2);
  for (std::uint64_t set = 0; set < 3; ++set) {
    CHECK(news.learn(Message::left(0, set, 0, 2, "")));
    CHECK(news.learn(Message::left(1, set, 0, 2, "")));
    CHECK(!news.learn(Message::left(0, set, 0, 2, "")));
    CHECK(!news.learn(Message::failed(0, set, Error(ErrorKind::kInternal, "why"))));
    CHECK(!news.learn(Message::waits(0, set, {set, {1}})));
    CHECK(news.known().empty());
  }
  CHECK(news.has_ended(0) && news.has_ended(2) && !news.has_ended(3));
}

TEST(news_survives_the_death_of_its_messengers) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    const int size = 3 + static_cast<int>(seed % 30);
    Simulation simulation(size, seed);
    auto& random = simulation.random();
    std::vector<int> failing;
    for (int round = 0; round < 4; ++round) {
      const int rank = static_cast<int>(random()) & 0xffff;
      const int teller = rank % size;
      if (simulation.alive(teller)) {
        simulation.say(teller, Message::failed(teller, 1, Error(ErrorKind::kInternal, "why")));
        failing.push_back(teller);
      }
      simulation.run(static_cast<int>(random() % 20));
      // Adjacent ranks, and some others, die with the news that they have not passed on.
      for (int i = 0; i < 3; ++i) {
        const int victim = static_cast<int>(
            random() % 2 != 0 ? (teller + 1 + i) % size : static_cast<int>(random() % 97) % size);
        int living = 0;
        for (int r = 0; r < size; ++r) living += simulation.alive(r);
        if (living > 1 && simulation.alive(victim)) simulation.kill(victim);
      }
    }
    simulation.run();
    std::vector<int> told(failing.size(), -1);
    for (int rank = 0; rank < size; ++rank) {
      if (!simulation.alive(rank)) continue;
      const auto& heard = simulation.heard(rank);
      for (int peer = 0; peer < size; ++peer) {
        CHECK_EQ(count(heard, Message::Kind::kLost, peer), simulation.alive(peer) ? 0 : 1);
      }
      // If the rank that told it lives, all know it; if it has died, either all survivors know it
      // or none.
      for (std::size_t i = 0; i < failing.size(); ++i) {
        const int times = count(heard, Message::Kind::kFailed, failing[i], 1);
        if (simulation.alive(failing[i])) CHECK_EQ(times, 1);
        if (told[i] < 0) told[i] = times;
        CHECK_EQ(times, told[i]);
      }
    }
  }
}

TEST(news_costs_a_message_for_each_end_of_a_connection_at_most) {
  for (const int size : {8, 64}) {
    Simulation simulation(size, 1);
    simulation.say(size / 2, Message::departed(size / 2));
    simulation.run();
    const Graph graph(std::vector<int>(static_cast<std::size_t>(size), 0));
    const std::vector<bool> all(static_cast<std::size_t>(size), true);
    const long degree = static_cast<long>(graph.neighbours(0, all).size());
    CHECK(simulation.messages() <= size * (degree - 1) + 1);
    CHECK(simulation.messages() >= size - 1);
  }
}

TEST(news_has_one_fate_for_a_rank) {
  News news(4);
  CHECK(news.learn(Message::departed(2)));
  CHECK(!news.learn(Message::lost(2, 1, "died")));
  CHECK(!news.learn(Message::departed(2)));
  CHECK(!news.learn(Message::heartbeat(3)));
  news.presume_departed(1);
  CHECK(news.departed(1) && !news.alive(1));
  CHECK(news.learn(Message::lost(1, 0, "died")));  // no longer only presumed
  CHECK(news.lost(1));
  CHECK(!news.has_failed(7));
  CHECK(news.learn(Message::failed(3, 7, Error(ErrorKind::kInternal, ""))));
  CHECK(news.learn(Message::failed(0, 7, Error(ErrorKind::kInternal, ""))));
  CHECK(!news.learn(Message::failed(3, 7, Error(ErrorKind::kInternal, "again"))));
  CHECK(news.has_failed(7) && !news.has_failed(6) && news.alive(3));
  CHECK_EQ(news.known().size(), 4u);
}

using Ranks = std::vector<int>;

Message tell(int rank, std::uint64_t number, const Ranks& ranks, std::uint64_t set = 0) {
  return Message::waits(rank, set, {number, ranks});
}

Ranks ends(const Waits& waits, const Ranks& ranks, std::uint64_t set = 0) {
  return waits.ends(set, ranks);
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
  CHECK(waits.any(7) && waits.any(8) && !waits.any(0));
  CHECK_EQ(ends(waits, {1}, 7), Ranks{2});
  CHECK_EQ(ends(waits, {1}, 8), Ranks{3});
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
}  // namespace torch_ring::test::control_news_test
